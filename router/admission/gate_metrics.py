"""Shows Prometheus what the gates do, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission_gate import Refusal
from router.admission.model_gates import ModelGates


class GateCollector(Collector):
    """Shows the gates of `models`: those that exist now, or "" while none is known."""

    def __init__(self, gates: ModelGates, models: Callable[[], Collection[str]]) -> None:
        self._gates = gates
        self._models = models

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "tandem_router_waiting_requests",
            "Requests in the router's line, by the model that serves them",
            labels=["model"],
        )
        started = GaugeMetricFamily(
            "tandem_router_prefilling_requests",
            "Requests at nodes that have no first byte yet, by the model that serves them",
            labels=["model"],
        )
        refusals = CounterMetricFamily(
            "tandem_router_refusals",
            "Requests refused by the router, by the model that would serve them, and reason",
            labels=["model", "reason"],
        )
        for model in sorted(self._models()) or [""]:
            gate = self._gates.known(model)
            waiting.add_metric([model], len(gate.line) if gate else 0)
            started.add_metric([model], gate.num_started if gate else 0)
            for reason in Refusal:
                refusals.add_metric([model, reason], gate.refusals[reason] if gate else 0)
        yield from (waiting, started, refusals)
