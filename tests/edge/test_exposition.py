"""Scrapers get the format that they take; exemplars lead from buckets to traces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families
from prometheus_client.registry import Collector
from starlette.requests import Request

from edge.http.exposition import Exposition
from tests.decode_node.http_node import http_node
from tests.router.cluster import run_cluster
from tests.router.token_server import TokenHandler

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331"
OPENMETRICS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""Prometheus sends this."""
BODY = {"prompt": "a dog", "max_tokens": 3}


def exemplars(text: str) -> Iterator[tuple[str, str]]:
    """Yields the histogram and the trace of each exemplar. All of it must be OpenMetrics."""
    assert text.endswith("# EOF\n")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.exemplar is not None:
                yield family.name, sample.exemplar.labels["trace_id"]


@pytest.mark.parametrize("flags", ["01", "00"])
async def test_a_decode_node_tells_of_sampled_traces(flags: str) -> None:
    async with http_node() as node:
        headers = {"traceparent": f"{PARENT}-{flags}"}
        await node.client.post("/v1/completions", json=BODY, headers=headers)
        answer = await node.client.get("/metrics", headers={"accept": OPENMETRICS})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        found = list(exemplars(answer.text))
    assert {trace for _, trace in found} == ({TRACE} if flags == "01" else set())
    if flags == "01":
        assert {name for name, _ in found} >= {
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
        }
        gaps = [name for name, _ in found if name == "vllm:inter_token_latency_seconds"]
        assert len(gaps) == 1, "the longest alone"


async def test_others_get_the_text_format() -> None:
    async with http_node() as node:
        await node.client.post("/v1/completions", json=BODY)
        for accept in ("", "*/*", "text/plain", "application/json"):
            answer = await node.client.get("/metrics", headers={"accept": accept})
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "# EOF" not in answer.text
        values = {
            sample.name: sample.value
            for family in plain_families(answer.text)
            for sample in family.samples
        }
    assert values["vllm:request_max_num_generation_tokens_sum"] == 3
    assert values["vllm:request_inference_time_seconds_count"] == 1
    assert values["vllm:request_prefill_kv_computed_tokens_sum"] > 0


async def test_a_router_tells_of_sampled_traces() -> None:
    async with run_cluster() as cluster:
        router = await cluster.router(await cluster.decode(handler=TokenHandler()))
        body = {"prompt": "a", "seed": 1, "max_tokens": 2, "stream": True}
        await router.text(body, traceparent=f"{PARENT}-01")
        url = f"{router.url}/metrics"
        async with router.client.get(url, headers={"accept": OPENMETRICS}) as answer:
            found = set(exemplars(await answer.text()))
        async with router.client.get(url) as answer:
            text = await answer.text()
    assert found == {
        ("tandem_router_time_to_first_byte_seconds", TRACE),
        ("tandem_router_request_duration_seconds", TRACE),
    }
    assert not re.search(r"^# EOF|# \{", text, re.MULTILINE)


class _InParts(Collector):
    """Yields one family in as many parts as asked for, and what stands around it."""

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.num_collected = 0

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("first", "stands before", 1)
        for part in range(self.num_parts):
            family = CounterMetricFamily("calls", "by caller", labels=["caller"])
            family.add_metric([f"caller-{part}"], part)
            self.num_collected += 1
            yield family
        yield GaugeMetricFamily("last", "stands behind", 2)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_a_family_in_parts_is_one_family(accept: str) -> None:
    registry = CollectorRegistry()
    registry.register(_InParts(3))
    scope = {"type": "http", "headers": [(b"accept", accept.encode())]}
    text = bytes((await Exposition(registry).response(Request(scope))).body).decode()
    parse = text_string_to_metric_families if accept else plain_families
    families = {family.name: family for family in parse(text)}
    assert list(families) == ["first", "calls", "last"]
    assert [sample.value for sample in families["calls"].samples] == [0, 1, 2]
    assert text.count("# TYPE calls") == 1


async def test_others_run_while_a_long_scrape_is_made() -> None:
    registry = CollectorRegistry()
    registry.register(parts := _InParts(5000))
    making = asyncio.create_task(
        Exposition(registry).response(Request({"type": "http", "headers": []}))
    )
    seen = set()
    while not making.done():
        await asyncio.sleep(0)
        seen.add(parts.num_collected)
    assert len(seen) > 5
    assert (await making).body.count(b"caller=") == 5000
