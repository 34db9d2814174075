"""A cluster tells of one request: one connected trace, by OTLP; one id in all logs; metrics that
a real Prometheus takes, with exemplars."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import pytest_asyncio

from tests.e2e.prometheus_process import Prometheus, needs_prometheus, run_prometheus
from tests.edge.otlp_collector import Collected, ReceivedSpan, http_collector
from tests.helm.test_metric_names import EXPORTER, dashboard_queries, rules, selectors

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
NUM_TOKENS = 40
HEADERS = {
    "traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01",
    "tracestate": "vendor=1",
    "x-request-id": "req-7.of_client",
}
SERVER, CLIENT = 2, 3


@pytest.fixture(scope="module")
def collected() -> Iterator[Collected]:
    with http_collector() as collected, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield collected


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(share_cluster: Any, collected: Collected) -> AsyncIterator[Any]:
    """Starts one with all that dashboards show switched on."""
    told = ("--otlp-traces-endpoint", collected.url, "--log-format", "json", "--log-requests")
    node = (*told, "--enable-prefix-caching", "--kv-host-memory-bytes", "4000000")
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    yield await share_cluster(
        decode_args=("--local-prefill-threshold", "0", *node, *drafts),
        prefill_args=node,
        router_args=told,
    )


async def ask(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> Any:
    # Long enough that the prefill node has told its end before the answer has one.
    body = {"model": "demo", "prompt": [7] * 40, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return response.headers


def of(spans: list[ReceivedSpan], trace: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == trace]


@pytest.mark.e2e
async def test_one_request_is_one_connected_trace(
    cluster: Any, collected: Collected, http: aiohttp.ClientSession
) -> None:
    await ask(http, cluster.url, HEADERS)
    services = {"tandem-router", "tandem-decode", "tandem-prefill"}

    def is_complete(spans: list[ReceivedSpan]) -> bool:
        """Each service sends its own, and a node those of its steps when it reads of them."""
        own = of(spans, TRACE)
        servers = {span.service for span in own if span.kind == SERVER}
        return servers == services and {"save layer 0", "token 2"} <= {span.name for span in own}

    spans = of(collected.wait(is_complete), TRACE)
    whole = {span.service: span for span in spans if span.kind == SERVER}
    calls = {span.service: span for span in spans if span.kind == CLIENT}
    router, decode, prefill = (whole[f"tandem-{name}"] for name in ("router", "decode", "prefill"))
    assert router.parent_id == CLIENT_SPAN
    assert decode.parent_id == calls["tandem-router"].span_id
    assert prefill.parent_id == calls["tandem-decode"].span_id
    assert router.name == f"POST {router.attributes['http.route']}" == "POST /v1/completions"
    assert (decode.name, prefill.name) == ("text_completion demo", "tandem.v1.Prefill/Prefill")
    assert calls["tandem-decode"].attributes["server.port"] > 0
    assert {span.state for span in spans} == {"vendor=1"}
    for span in spans:
        assert span.attributes["gen_ai.request.id"] == "req-7.of_client", (span.service, span.name)
        assert span.kind == SERVER or span.parent_id == whole[span.service].span_id
        assert not span.is_error
    names = {service: {s.name for s in spans if s.service == service} for service in services}
    assert names["tandem-router"] == {router.name, "POST", "queue", "first byte"}
    assert {"queue", "prefill", "token 1", "stream", "token 2"} <= names["tandem-decode"]
    assert {"queue", "prefill", "save layer 0"} <= names["tandem-prefill"]
    # What happened inside another one's call happened in its time.
    assert router.start_ns <= decode.start_ns <= prefill.start_ns < decode.end_ns
    assert decode.attributes["gen_ai.usage.input_tokens"] == 40
    assert decode.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert decode.attributes["gen_ai.request.model"] == "demo"
    assert 0 < decode.attributes["gen_ai.latency.time_to_first_token"] < 60
    (stream,) = (span for span in spans if span.name == "stream")
    assert stream.attributes["tandem.kv.bytes"] == prefill.attributes["tandem.kv.bytes"] > 0


@pytest.mark.e2e
async def test_what_the_caller_does_not_sample_is_not_exported(
    cluster: Any, collected: Collected, http: aiohttp.ClientSession
) -> None:
    quiet, loud = "1" * 32, "2" * 32
    for trace, flags in ((quiet, "00"), (loud, "01")):
        await ask(http, cluster.url, {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}"})
    spans = collected.wait(lambda spans: len({s.service for s in of(spans, loud)}) == 3)
    assert not of(spans, quiet)


@pytest.mark.e2e
async def test_all_services_log_one_id(cluster: Any, http: aiohttp.ClientSession) -> None:
    given = {"traceparent": f"00-{'3' * 32}-{CLIENT_SPAN}-01", "x-request-id": "req-8"}
    answered = await ask(http, cluster.url, given)
    assert answered.getall("x-request-id") == ["req-8"]
    for service in ("router", "decode", "prefill"):
        line = await cluster.wait_log(service, '"request_id": "req-8"')
        told = json.loads(line.partition(": ")[2])
        assert (told["level"], told["trace_id"]) == ("info", "3" * 32)
        # An answer may end before the stream of its prefill does, which then is left.
        fine = "POST /v1/completions 200", "prefill done", "prefill cancelled"
        assert told["message"].startswith(fine), told
    for line in cluster.logs:
        service, _, text = line.partition(": ")
        told = json.loads(text)
        assert {"time", "level", "logger", "process", "message"} <= told.keys(), line


# Metrics -----------------------------------------------------------------------------------------

NOT_HERE = {
    "tandem_tls_certificate_expiry_timestamp_seconds",  # no TLS in this cluster
}
"""Series that alerts and dashboards name and that this cluster has no reason to have."""


def targets_of(cluster: Any) -> dict[str, dict[str, str]]:
    """Maps what is scraped to the labels that PodMonitors give."""
    found = {cluster.url.removeprefix("http://"): "router"}
    for name, nodes in (("prefill", cluster.prefills), ("decode", cluster.decodes)):
        for node in nodes:
            found[re.sub("https?://|/metrics", "", node.metrics_url)] = name
    given = {"namespace": "default", "release": "tandem"}
    return {
        target: {**given, "component": component, "pod": f"{component}-0"}
        for target, component in found.items()
    }


def series_in(query: str) -> set[str]:
    return {selector.name for selector in selectors(promql_parser.parse(query))}


async def check_queries(prometheus: Prometheus, known: set[str]) -> None:
    """Prometheus answers each query of dashboards and alerts, and knows each series in them."""
    queries = [
        query.replace('"n"', '"default"').replace('"r"', '"tandem"')
        for _, _, query in dashboard_queries()
    ]
    missing = set()
    for query in (*queries, *(rule["expr"] for rule in rules("production"))):
        await prometheus.get("query", query=query)
        missing |= {name for name in series_in(query) if not name.startswith(EXPORTER)} - known
    assert missing == NOT_HERE


@pytest.mark.e2e
@needs_prometheus
async def test_a_real_prometheus_takes_all_of_it(
    cluster: Any, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    trace = "4" * 32
    await ask(http, cluster.url, {"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"})
    targets = targets_of(cluster)
    judged = [dict(rule) for rule in rules("production")]
    async with run_prometheus(tmp_path, targets, judged) as prometheus:
        for target in await prometheus.wait_up(len(targets)):
            assert target["lastError"] == "", target
        known = set(await prometheus.get("label/__name__/values"))
        await check_queries(prometheus, known)
        for histogram in (
            "tandem_router_time_to_first_byte_seconds_bucket",
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:inter_token_latency_seconds_bucket",
        ):
            found = await prometheus.get(
                "query_exemplars", query=histogram, start="0", end="9999999999"
            )
            traces = {e["labels"]["trace_id"] for each in found for e in each["exemplars"]}
            assert trace in traces, histogram
        for rule in await prometheus.judged_rules():
            assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
