"""Scrapers get the format that they take; exemplars lead from buckets to traces."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

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
