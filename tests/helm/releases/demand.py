"""Metrics of each tier say how many pods its load asks for."""

from __future__ import annotations

import re

from tests.kubernetes_stand_in.resources import Object

_POD_METRICS = {"tandem_waiting_tokens": 12_000.0, "vllm:kv_cache_usage_perc": 0.8}
"""One pod at its target has so much, by the chart's defaults: 1.5 s of 8000 tokens a second."""
_QUERIES = {"tandem_waiting_tokens": 1.5, "vllm:kv_cache_usage_perc": 0.8}


class Demand:
    """Answers autoscalers. `pods`: by tier; None: its metrics are lost."""

    def __init__(self, **pods: float | None) -> None:
        self.pods = pods

    def pod_metric(self, name: str, target: Object) -> float | None:
        """Answers as the custom metrics API does, summed over the pods."""
        needed = self.pods[target["metadata"]["labels"]["app.kubernetes.io/component"]]
        return None if needed is None else needed * _POD_METRICS[name]

    def query(self, text: str) -> float | None:
        """Answers as Prometheus does: no series give no value, not even from a sum."""
        (tier,) = re.findall(r'component="(\w+)"', text)
        needed = self.pods[tier]
        assert " or " not in text, "a query must be empty when it is blind"
        (name,) = (metric for metric in _QUERIES if metric in text)
        return None if needed is None else needed * _QUERIES[name]
