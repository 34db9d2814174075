"""Shows Prometheus whether nodes have followed what was done to adapters, at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.nodes.adapters.adapter_sync import AdapterSync


class AdaptersCollector(Collector):
    """Counts what nodes are behind in."""

    def __init__(self, adapters: AdapterSync) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "tandem_router_adapters_behind",
            "Adapters that nodes have yet to load or to unload, summed over the nodes of a tier",
            labels=["tier"],
        )
        for role, count in self._adapters.num_behind().items():
            family.add_metric([role], count)
        yield family
