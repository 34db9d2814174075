"""Metrics that exist only where a setting asks for them, under vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.contracts.outputs import (
    RESIDENCY_BUCKETS,
    Durations,
    ResidencyStats,
    TokensPerStep,
    WorkStats,
)
from engine.node.metrics.device_peaks import DevicePeaks


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


def work_metrics(
    stats: WorkStats | None, peaks: DevicePeaks, labels: Sequence[str], values: Sequence[str]
) -> Iterable[Metric]:
    """Yields what `--enable-mfu-metrics` counts; nothing without it, and no gauge of what is not
    known of the device."""
    if stats is None:
        return
    for name, text, value in (
        ("flops", "Floating point operations", stats.flops),
        ("read_bytes", "Bytes read from memory", stats.read_bytes),
        ("write_bytes", "Bytes written to memory", stats.write_bytes),
    ):
        counter = CounterMetricFamily(
            f"vllm:estimated_{name}_per_gpu",
            f"{text} of one GPU, by the model's own cost.",
            labels=labels,
        )
        counter.add_metric(values, value)
        yield counter
    for name, text, peak, of_kind in (
        (
            "tandem_model_flops_utilization",
            "Part of a GPU's FLOP/s that the latest steps of a kind used, 0 to 1.",
            (peaks.tflops or 0) * 1e12,
            attrgetter("flops"),
        ),
        (
            "tandem_memory_bandwidth_utilization",
            "Part of a GPU's memory bandwidth that the latest steps of a kind used, 0 to 1.",
            (peaks.gbps or 0) * 1e9,
            attrgetter("num_bytes"),
        ),
    ):
        if peak:
            gauge = GaugeMetricFamily(name, text, labels=(*labels, "kind"))
            for kind, rates in stats.kinds.items():
                if rates.seconds > 0:
                    gauge.add_metric((*values, kind), of_kind(rates) / rates.seconds / peak)
            yield gauge


def histogram_of(
    name: str,
    text: str,
    seen: Durations | TokensPerStep,
    bounds: Sequence[float],
    labels: Sequence[str],
    values: Sequence[str],
) -> Metric:
    """Returns the histogram of what was seen, whose upper bounds are `bounds`."""
    histogram = HistogramMetricFamily(name, text, labels=labels)
    uppers = [*(str(float(bound)) for bound in bounds), "+Inf"]
    buckets = list(zip(uppers, accumulate(seen.counts), strict=True))
    total = seen.total_s if isinstance(seen, Durations) else seen.total
    histogram.add_metric(values, buckets, total)
    return histogram
