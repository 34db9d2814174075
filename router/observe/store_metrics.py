"""Measures the stores: of responses, and of files and batches."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.observe.metrics import RouterMetrics

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_KINDS = ("read", "write")


class StoreMetrics:
    """Holds the metrics. `num_running` tells the responses that are worked on in the
    background."""

    def __init__(self, router: RouterMetrics, registry: CollectorRegistry) -> None:
        self.num_running: Callable[[], int] = lambda: 0
        self._router = router
        self._seconds = Histogram(
            "tandem_router_store_seconds",
            "Time of a transaction of the store of responses or batches, in seconds.",
            ["kind"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._failures = Counter(
            "tandem_router_store_failures",
            "Transactions of the store of responses or batches that failed, or took too long.",
            ["kind"],
            registry=registry,
        )
        running = Gauge(
            "tandem_router_background_responses",
            "Responses that this router works on in the background.",
            registry=registry,
        )
        running.set_function(lambda: self.num_running())
        for kind in _KINDS:
            self._seconds.labels(kind)
            self._failures.labels(kind)

    def observe(self, kind: str, seconds: float, has_failed: bool) -> None:
        """Counts each transaction."""
        self._seconds.labels(kind).observe(seconds)
        if has_failed:
            self._failures.labels(kind).inc()

    def refused(self, path: str, tenant: str, status: int) -> None:
        """Counts requests that end before they are placed."""
        self._router.requests.labels(path, status).inc()
        self._router.by_tenant.add((tenant,), str(status))
