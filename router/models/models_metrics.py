"""Shows Prometheus which models can be served, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.models.known_models import KnownModels
from router.nodes.address import NodeRole
from router.nodes.node import NodeState


class ModelsCollector(Collector):
    """Counts the ready decode nodes of each model, of those that are expected back as well."""

    def __init__(self, models: KnownModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        registry = self._models.registry
        ready = Counter(
            node.model
            for node in registry.nodes(NodeRole.DECODE)
            if registry.state(node) is NodeState.READY
        )
        family = GaugeMetricFamily(
            "tandem_router_model_ready_nodes",
            "Ready decode nodes of each model that nodes serve, lately served, or the rules name",
            labels=["model"],
        )
        for model in sorted(self._models.table.models()):
            family.add_metric([model], ready[model])
        yield family
