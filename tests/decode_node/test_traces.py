"""A line for each request: what happened when, and nothing of what was said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decode_node.metrics import DecodeMetrics
from decode_node.observe.request_spans import spans_of
from decode_node.observe.timeline import PrefillRecord, RequestRecord
from edge.logs.formatters import JsonFormatter
from edge.tracing.context import TraceContext
from edge.tracing.export.file import TraceFile
from edge.tracing.span import Span
from edge.tracing.tracer import Tracer
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from kv_transfer.metadata import TransferStats
from tests.decode_node.http_node import http_node
from tests.engine.core.tiny_engine import tiny_config

TRACE = "0af7651916cd43dd8448eb211c80319c"


def spans_in(path: Path) -> list[list[dict[str, Any]]]:
    return [
        json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
        for line in path.read_text().splitlines()
    ]


def test_a_line_is_otlp(tmp_path: Path) -> None:
    tracer = Tracer(TraceFile(tmp_path / "traces", {"service.name": "tandem-decode"}))
    now = time.monotonic()
    tracer.write(
        TraceContext(TRACE),
        [Span("request", now, now + 2.0, {"n": 3, "path": "x"}), Span("a", now, 0)],
    )
    tracer.close()
    line = json.loads((tmp_path / "traces").read_text())
    (resource,) = line["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "tandem-decode"}} in (
        resource["resource"]["attributes"]
    )
    root, part = resource["scopeSpans"][0]["spans"]
    assert (root["traceId"], root["kind"], "parentSpanId" in root) == (TRACE, 2, False), "it began"
    assert (part["parentSpanId"], part["kind"]) == (root["spanId"], 1)
    assert root["attributes"][0] == {"key": "n", "value": {"intValue": "3"}}
    start, end = int(root["startTimeUnixNano"]), int(root["endTimeUnixNano"])
    assert end - start == pytest.approx(2e9, abs=2)
    assert abs(start / 1e9 - time.time()) < 60
    assert part["startTimeUnixNano"] == part["endTimeUnixNano"], "never before its start"


def test_all_parts_of_a_request_whose_kv_came_from_elsewhere() -> None:
    record = RequestRecord(2000, received_at=10.0, prefill=PrefillRecord(admitted_at=10.25))
    record.prefill.remote_queue_s, record.prefill.remote_prefill_s = 0.25, 1.0
    record.first_token_at, record.second_token_at, record.last_token_at = 11.5, 12.5, 14.0
    record.prefill.kv = TransferStats(4096, 8, 10.75, 12.0, received_at=11.75)
    prefill = record.prefill
    prefill.prefill_node, prefill.path, prefill.failures = "p:1", "remote", ["timeout"]
    record.finish_reason = "stop"
    asked = GenerationRequest("r", RequestSpec([1], SamplingParams(temperature=0.5)))
    record.operation = "chat"
    request, *parts = spans_of(record, asked, "m")
    assert (request.start, request.end) == (10.0, 14.0)
    assert {
        "tandem.prefill.node": "p:1",
        "tandem.prefill.failures": ("timeout",),
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 2000,
        "gen_ai.usage.prompt_tokens": 2000,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.time_in_model_decode": 2.5,
        "gen_ai.latency.e2e": 4.0,
        "gen_ai.response.finish_reasons": ("stop",),
    }.items() <= request.attributes.items()
    assert (request.name, request.error) == ("chat m", "")
    record.finish_reason = "error"
    assert spans_of(record, asked, "m")[0].error
    assert [(span.name, span.start, span.end) for span in parts] == [
        ("queue", 10.0, 10.5),
        ("prefill", 10.5, 11.5),
        ("token 1", 10.0, 11.5),
        ("stream", 10.75, 11.75),
        ("inject", 11.75, 12.0),
        ("join", 12.0, 12.5),
        ("token 2", 11.5, 12.5),
    ]


async def test_requests_are_written_when_they_end(tmp_path: Path) -> None:
    path = tmp_path / "traces"
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    body = {"prompt": "the secret dog", "max_tokens": 3}
    async with http_node(trace_file=path) as node:
        for _ in range(2):
            await node.client.post("/v1/completions", json=body, headers=headers)
        found = spans_in(path)
        assert [{span["traceId"] for span in spans} for spans in found] == [{TRACE}] * 2
        names = ["text_completion tiny", "queue", "prefill", "token 1", "token 2"]
        assert [span["name"] for span in found[0]] == names
        assert "secret" not in path.read_text()


async def test_each_service_is_a_child_of_its_caller(tmp_path: Path) -> None:
    """Spans lead from the router to the decode node, there to one for each choice, and from the
    first one of a prompt to prefill."""
    router = TraceContext(TRACE)
    path = tmp_path / "decode"
    async with http_node(trace_file=path) as node:
        node.nodes.on_call = lambda call: call.first_token()
        headers = {**router.child_headers(), "x-prefiller-host-port": "a:1"}
        body = {"prompt": ["a dog", "a cat"], "max_tokens": 1, "n": 2}
        await node.client.post("/v1/completions", json=body, headers=headers)
        calls = [call.request.trace for call in node.nodes.calls]
    decode = [root for root, *_ in spans_in(path)]
    assert {span["parentSpanId"] for span in decode} == {router.span_id}
    assert len(calls) == 2
    assert {span["spanId"] for span in decode} > {call.span_id for call in calls if call}
    assert len(decode) == len({span["spanId"] for span in decode}) == 4
    for _, *parts in spans_in(path):
        assert {part["parentSpanId"] for part in parts} <= {span["spanId"] for span in decode}


def test_the_same_parts_are_measured() -> None:
    record = RequestRecord(
        2000,
        received_at=10.0,
        prefill=PrefillRecord(admitted_at=10.25, attempts=3, path="remote"),
    )
    record.prefill.remote_queue_s, record.prefill.remote_prefill_s = 0.25, 1.0
    record.first_token_at, record.second_token_at, record.last_token_at = 11.5, 12.5, 14.0
    record.prefill.kv = TransferStats(5 * 10**9, 8, 10.75, 12.0, received_at=11.75)
    choice: Any = SimpleNamespace(
        record=record, replay=None, is_first_of_prompt=True, request=SimpleNamespace(trace=None)
    )
    metrics = DecodeMetrics(tiny_config())
    # Another choice of the same prompt, aborted before its first token: nothing of it is new.
    sibling: Any = SimpleNamespace(
        record=RequestRecord(2000, prefill=record.prefill),
        replay=None,
        is_first_of_prompt=False,
        request=SimpleNamespace(trace=None),
    )
    metrics.observe([choice, sibling])
    found = {
        sample.name: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith(("_sum", "_total"))
    }
    for name, value in {
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:request_prefill_time_seconds_sum": 1.0,
        "vllm:time_to_first_token_seconds_sum": 1.5,
        "tandem_kv_transfer_seconds_sum": 1.25,
        "tandem_kv_transfer_bytes_per_second_sum": 4e9,
        "tandem_kv_inject_seconds_sum": 0.25,
        "tandem_kv_ready_after_first_token_seconds_sum": 0.5,
        "tandem_join_seconds_sum": 0.5,
        "tandem_second_token_seconds_sum": 1.0,
        "tandem_kv_received_bytes_total": 5e9,
        "tandem_prefill_attempts_total": 3,
        "tandem_prefill_retries_total": 2,
    }.items():
        assert found[name] == pytest.approx(value), name


def requests_told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Fields of the lines about requests, of the names that the JSON log has."""
    return [
        json.loads(JsonFormatter("decode").format(record))
        for record in caplog.records
        if record.name == "edge.logs.request_log"
    ]


async def test_each_request_has_a_line_if_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    body = {"prompt": "the secret dog", "max_tokens": 3, "n": 2}
    async with http_node(log_requests=True) as node:
        await node.client.post("/v1/completions", json=body)
        await node.client.post("/v1/completions", json={**body, "stream": True})
        await node.client.post("/v1/completions", json={**body, "max_tokens": -1})
        await node.client.get("/secret/%0A" + "x" * 200)
        await node.client.get("/health")
    whole, streamed, wrong, missing = requests_told(caplog)
    for told in (whole, streamed):
        assert told["message"] == "POST /v1/completions 200"
        assert (told["output_tokens"], told["finish_reason"]) == (6, "length,length")
        assert told["prompt_tokens"] > 0 and told["model"] == "tiny"
        assert 0 < told["first_token_s"] <= told["duration_s"]
    assert (wrong["status"], "output_tokens" in wrong) == (400, False)
    assert missing["status"] == 404 and len(missing["path"]) == 128 and "\n" not in missing["path"]
    assert "secret dog" not in caplog.text


async def test_no_line_unless_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with http_node() as node:
        await node.client.post("/v1/completions", json={"prompt": "a dog", "max_tokens": 1})
    assert requests_told(caplog) == []
