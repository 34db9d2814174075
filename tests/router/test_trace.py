"""W3C trace context: continued, or begun; what is not one is not passed on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edge.logs.formatters import JsonFormatter
from edge.tracing.context import TraceContext
from tests.router.cluster import Cluster, eventually
from tests.router.fakes import answer_json, break_after, event, stream_tokens
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
    assert headers["traceparent"] == f"00-{TRACE}-{parts[-1]['spanId']}-01"
    assert (request["traceId"], request["parentSpanId"]) == (TRACE, PARENT.split("-")[2])
    assert request["name"] == "POST /v1/completions"
    assert attributes(request)["http.route"] == "/v1/completions"
    assert [part["name"] for part in parts] == ["queue", "first byte", "POST"]
    host, port = node.target.split("/")[0].rsplit(":", 1)
    assert attributes(parts[-1]).items() >= {"server.address": host, "server.port": port}.items()
    assert {part["parentSpanId"] for part in parts} == {request["spanId"]}
    assert {"key": "http.response.status_code", "value": {"intValue": "200"}} in request[
        "attributes"
    ]


def test_a_later_version_may_have_more_behind_the_flags() -> None:
    trace = TraceContext.from_headers({"traceparent": f"cc{PARENT[2:]}-more"})
    assert trace.trace_id == TRACE


@pytest.mark.parametrize(
    "given",
    [
        "", "00-1", PARENT.upper(), PARENT + "x", PARENT + "-more", f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{TRACE}-{'0' * 16}-01", PARENT + "\n",
    ],
)  # fmt: skip
def test_what_is_no_trace_begins_a_new_one(given: str) -> None:
    trace = TraceContext.from_headers({"traceparent": given, "tracestate": "vendor=1"})
    assert trace.trace_id != TRACE
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace.child_headers()["traceparent"])
    assert "tracestate" not in trace.child_headers()


def test_a_later_version_is_understood_as_far_as_it_goes() -> None:
    trace = TraceContext.from_headers({"traceparent": f"01{PARENT[2:]}-more"})
    assert trace.child_headers()["traceparent"].startswith(f"00-{TRACE}-")


@pytest.mark.parametrize("state", ["a=1\nb", "x" * 513, "\x00"])
def test_a_strange_state_is_dropped(state: str) -> None:
    trace = TraceContext.from_headers({"traceparent": PARENT, "tracestate": state})
    assert "tracestate" not in trace.child_headers()


def written(path: Path) -> list[dict[str, Any]]:
    """The router's own spans."""
    found = []
    for line in path.read_text().splitlines():
        (resource,) = json.loads(line)["resourceSpans"]
        found.append(resource["scopeSpans"][0]["spans"][0])
    return found


def attributes(span: dict[str, Any]) -> dict[str, str]:
    return {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}


async def test_spans_say_what_failed(cluster: Cluster, tmp_path: Path) -> None:
    node = await cluster.decode()
    path = tmp_path / "traces"
    router = await cluster.router(node, trace_file=path, max_migrations=0)
    broken = break_after(event(0), stream=True)
    for handler in (
        answer_json(400, {"error": {}}), answer_json(500, {"error": {}}), broken, stream_tokens(1)
    ):  # fmt: skip
        node.handler = handler
        async with router.post(BODY, x_request_id="req-7") as response:
            await response.read()
    await eventually(lambda: len(written(path)) == 4)
    wrong, failed, lost, fine = written(path)
    assert "status" not in wrong and "status" not in fine, (
        "a client's mistake is no failure of ours"
    )
    assert failed["status"] == {"code": 2, "message": "status 500"}
    assert attributes(failed)["error.type"] == "500"
    assert lost["status"]["code"] == 2 and "lost" in lost["status"]["message"]
    assert attributes(lost)["http.response.status_code"] == "200"
    assert {attributes(span)["gen_ai.request.id"] for span in written(path)} == {"req-7"}
    assert attributes(fine)["url.path"] == "/v1/completions"


async def test_a_share_of_new_traces_is_sampled(cluster: Cluster) -> None:
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node, trace_sample_ratio=0.0)
    await router.text(BODY)
    await router.text(BODY, traceparent=PARENT)
    flags = [headers["traceparent"][-2:] for headers, _ in node.requests]
    assert flags == ["00", "01"]


async def test_each_request_has_a_line_if_wanted(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node, log_requests=True)
    await router.text({**BODY, "prompt": "a secret"}, x_request_id="req-7")
    async with router.post([]) as response:
        assert response.status == 400

    def told() -> list[dict[str, Any]]:
        lines = [r for r in caplog.records if r.name == "edge.logs.request_log"]
        return [json.loads(JsonFormatter("router").format(line)) for line in lines]

    await eventually(lambda: len(told()) == 2)
    fine, wrong = told()
    assert (fine["message"], fine["status"]) == ("POST /v1/completions 200", 200)
    assert fine["decode_node"] == node.target and fine["tenant"]
    assert 0 <= fine["queue_s"] <= fine["first_byte_s"] <= fine["duration_s"]
    assert wrong["status"] == 400 and "decode_node" not in wrong
    assert "secret" not in caplog.text
