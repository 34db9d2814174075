"""W3C trace context: continued, or begun; what is not one is not passed on."""

from __future__ import annotations

import re

import pytest

from tandem_wire.trace_context import TraceContext
from tests.router.router_cluster import Cluster
from tests.router.token_server import TokenHandler

BODY = {"prompt": "a", "seed": 1, "max_tokens": 2, "stream": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def test_a_trace_goes_on_in_a_span_of_its_own(cluster: Cluster) -> None:
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node)
    for _ in range(2):
        await router.text(BODY, traceparent=PARENT, tracestate="vendor=1")
    first, second = (headers for headers, _ in node.requests)
    for headers in (first, second):
        assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", headers["traceparent"])
        assert headers["traceparent"] != PARENT
        assert headers["tracestate"] == "vendor=1"
    assert first["traceparent"] != second["traceparent"]


@pytest.mark.parametrize(
    "given",
    [
        "", "00-1", PARENT.upper(), PARENT + "-more"[:0] + "x", f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{TRACE}-{'0' * 16}-01", PARENT + "\n",
    ],
)  # fmt: skip
def test_what_is_no_trace_begins_a_new_one(given: str) -> None:
    trace = TraceContext.from_headers({"traceparent": given, "tracestate": "vendor=1"})
    assert trace.trace_id != TRACE
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", trace.child_headers()["traceparent"])
    assert "tracestate" not in trace.child_headers()


def test_a_later_version_is_understood_as_far_as_it_goes() -> None:
    trace = TraceContext.from_headers({"traceparent": f"01{PARENT[2:]}-more"})
    assert trace.child_headers()["traceparent"].startswith(f"00-{TRACE}-")


@pytest.mark.parametrize("state", ["a=1\nb", "x" * 513, "\x00"])
def test_a_strange_state_is_dropped(state: str) -> None:
    trace = TraceContext.from_headers({"traceparent": PARENT, "tracestate": state})
    assert "tracestate" not in trace.child_headers()
