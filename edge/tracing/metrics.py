"""Tells Prometheus what became of spans."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.tracing.tracer import Tracer

_EXPORTED = "exported"


class TracerCollector(Collector):
    """Collects that of one tracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def collect(self) -> Iterator[Metric]:
        counts = self._tracer.counts()
        yield CounterMetricFamily(
            "tandem_trace_spans_exported",
            "Spans that the collector of traces took.",
            value=counts.pop(_EXPORTED),
        )
        dropped = CounterMetricFamily(
            "tandem_trace_spans_dropped",
            "Spans that were lost: the queue was full, the collector did not take them, or the "
            "trace file could not be written.",
            labels=["reason"],
        )
        for reason, count in counts.items():
            dropped.add_metric([reason], count)
        yield dropped
