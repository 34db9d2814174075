"""Metrics that exist only where a setting asks for them, under vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from engine.outputs import RESIDENCY_BUCKETS, Durations, ResidencyStats


def residency_metrics(
    stats: ResidencyStats | None, labels: Sequence[str], values: Sequence[str]
) -> Iterable[Metric]:
    """Yields the histograms of `--kv-cache-metrics`; nothing without it."""
    if stats is None:
        return
    for name, text, durations in (
        (
            "vllm:kv_block_lifetime_seconds",
            "Time from the allocation of a watched KV block until its content was evicted.",
            stats.lifetime,
        ),
        (
            "vllm:kv_block_idle_before_evict_seconds",
            "Time from the last use of a watched KV block until its content was evicted.",
            stats.idle_before_evict,
        ),
        (
            "vllm:kv_block_reuse_gap_seconds",
            "Time from a use of a watched KV block until another request found it.",
            stats.reuse_gap,
        ),
    ):
        yield histogram_of(name, text, durations, RESIDENCY_BUCKETS, labels, values)


def histogram_of(
    name: str,
    text: str,
    durations: Durations,
    bounds: Sequence[float],
    labels: Sequence[str],
    values: Sequence[str],
) -> Metric:
    """Returns the histogram of `durations`, whose upper bounds are `bounds`."""
    histogram = HistogramMetricFamily(name, text, labels=labels)
    uppers = [*map(str, bounds), "+Inf"]
    buckets = list(zip(uppers, accumulate(durations.counts), strict=True))
    histogram.add_metric(values, buckets, durations.total_s)
    return histogram
