"""Measures batches: how many there are here, and what became of their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

STATUSES = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(slots=True)
class BatchTotals:
    """Counts requests of batches since the start of this router."""

    num_completed: int = 0
    num_failed: int = 0
    num_retried: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Is one batch as the status page shows it. `num_open` requests have no answer yet."""

    id: str
    tenant: str
    model: str
    status: str
    num_total: int
    num_completed: int
    num_failed: int
    expires_at: float

    @property
    def num_open(self) -> int:
        return max(0, self.num_total - self.num_completed - self.num_failed)


@dataclass(frozen=True, slots=True, eq=False)
class BatchCollector(Collector):
    """Makes the metrics of what this router works on."""

    totals: BatchTotals
    facts: Callable[[], Iterable[BatchFacts]]
    num_running: Callable[[], int]

    def collect(self) -> Iterator[Metric]:
        facts = list(self.facts())
        batches = GaugeMetricFamily(
            "tandem_router_batches", "Batches that this router works on", labels=["status"]
        )
        for status in STATUSES:
            batches.add_metric([status], sum(one.status == status for one in facts))
        yield batches
        yield GaugeMetricFamily(
            "tandem_router_batch_requests_open",
            "Requests of the batches that this router works on which have no answer yet",
            value=sum(one.num_open for one in facts),
        )
        yield GaugeMetricFamily(
            "tandem_router_batch_requests_running",
            "Requests of batches that are at nodes now",
            value=self.num_running(),
        )
        ended = CounterMetricFamily(
            "tandem_router_batch_requests", "Requests of batches by their end", labels=["outcome"]
        )
        ended.add_metric(["completed"], self.totals.num_completed)
        ended.add_metric(["failed"], self.totals.num_failed)
        ended.add_metric(["retried"], self.totals.num_retried)
        yield ended
