"""Metrics of data-parallel groups, each of which has requests and a KV cache of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.contracts.outputs import GroupStats

_GAUGES = {
    "num_running": ("running_requests", "Requests in rows."),
    "num_waiting": ("waiting_requests", "Requests that wait for a row or blocks."),
    "num_waiting_tokens": ("waiting_tokens", "Prompt tokens that are not computed yet."),
    "num_free_blocks": ("free_blocks", "KV blocks that are free or could be."),
}
_COUNTERS = {
    "prompt_tokens_cached": ("prompt_tokens_cached", "Prompt tokens found in the group's cache."),
    "prompt_tokens_computed": ("prompt_tokens_computed", "Prompt tokens that it has computed."),
}


def group_metrics(
    groups: Sequence[GroupStats], labels: Sequence[str], values: Sequence[str]
) -> Iterable[Metric]:
    """Yields nothing for an engine without groups."""
    if not groups:
        return
    for kind, families in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for field, (name, text) in families.items():
            family = kind(f"tandem_group_{name}", text, labels=(*labels, "group"))
            for index, stats in enumerate(groups):
                family.add_metric((*values, str(index)), getattr(stats, field))
            yield family
