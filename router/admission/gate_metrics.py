"""Shows Prometheus what the gate does, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission_gate import AdmissionGate, Refusal


class GateCollector(Collector):
    def __init__(self, gate: AdmissionGate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[Metric]:
        gate = self._gate
        yield GaugeMetricFamily(
            "tandem_router_waiting_requests", "Requests in the router's line", len(gate.line)
        )
        yield GaugeMetricFamily(
            "tandem_router_prefilling_requests",
            "Requests at nodes that have no first byte yet",
            gate.num_started,
        )
        refusals = CounterMetricFamily(
            "tandem_router_refusals", "Requests refused by the router, by reason", labels=["reason"]
        )
        for reason in Refusal:
            refusals.add_metric([reason], gate.refusals[reason])
        yield refusals
