"""Shows Prometheus how many nodes each tier should have, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.models.per_model import PerModel
from router.nodes.address import NodeRole
from router.scaling.scaling_signal import ScalingSignal

_PART_MODELS = 20


class ScalingCollector(Collector):
    """Shows the signals of `models`: those that exist now, or "" while none is known."""

    def __init__(
        self, signals: PerModel[ScalingSignal], models: Callable[[], Collection[str]]
    ) -> None:
        self._signals = signals
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yields each family in parts: a signal looks at all nodes."""
        models = sorted(self._models()) or [""]
        parts = [models[i : i + _PART_MODELS] for i in range(0, len(models), _PART_MODELS)]
        yield from map(self._desired, parts)
        yield from map(self._ratio, parts)

    def _desired(self, models: Sequence[str]) -> Metric:
        family = GaugeMetricFamily(
            "tandem_router_desired_replicas",
            "This router's share of the nodes that keep the objectives, to be added up over the "
            "routers; absent while unknown",
            labels=["model", "tier"],
        )
        for model in models:
            for role in NodeRole:
                share = self._signals.of(model).desired(role)
                if share is not None:
                    family.add_metric([model, role], share)
        return family

    def _ratio(self, models: Sequence[str]) -> Metric:
        family = GaugeMetricFamily(
            "tandem_router_ttft_load_ratio",
            "Predicted time to the first token over its objective; absent while unknown",
            labels=["model"],
        )
        for model in models:
            signal = self._signals.of(model)
            ttft_s = signal.predicted_ttft_s()
            if ttft_s is not None and signal.objectives.ttft_s:
                family.add_metric([model], ttft_s / signal.objectives.ttft_s)
        return family
