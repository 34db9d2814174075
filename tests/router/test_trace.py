"""W3C trace context: continued, or begun; what is not one is not passed on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edge.tracing.context import TraceContext
from tests.router.cluster import Cluster
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


async def test_spans_of_nodes_are_below_ours(cluster: Cluster, tmp_path: Path) -> None:
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node, trace_file=tmp_path / "traces")
    await router.text({**BODY, "prompt": "a secret"}, traceparent=PARENT)
    text = (tmp_path / "traces").read_text()
    assert "secret" not in text
    (resource,) = json.loads(text)["resourceSpans"]
    request, *parts = resource["scopeSpans"][0]["spans"]
    ((headers, _),) = node.requests
    assert headers["traceparent"] == f"00-{TRACE}-{request['spanId']}-01"
    assert (request["traceId"], request["parentSpanId"]) == (TRACE, PARENT.split("-")[2])
    assert [part["name"] for part in parts] == ["queue", "first byte"]
    assert {part["parentSpanId"] for part in parts} == {request["spanId"]}
    assert {"key": "status", "value": {"intValue": "200"}} in request["attributes"]


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
