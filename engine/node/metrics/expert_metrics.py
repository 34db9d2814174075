"""Metrics of experts that move between workers (EPLB)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.contracts.outputs import ExpertStats


def expert_metrics(
    stats: ExpertStats | None, labels: Sequence[str], values: Sequence[str]
) -> Iterable[Metric]:
    """Yields how evenly experts are chosen; nothing without `--enable-eplb`."""
    if stats is None:
        return
    gauge = GaugeMetricFamily(
        "tandem_eplb_balancedness",
        "Mean load of workers' experts by the highest, in the steps before the last placement; "
        "planned: with that placement. 1 is even.",
        labels=(*labels, "placement"),
    )
    gauge.add_metric((*values, "observed"), stats.balancedness)
    gauge.add_metric((*values, "planned"), stats.planned_balancedness)
    yield gauge
    for name, text, count in (
        ("rearrangements", "Times that experts were placed anew.", stats.num_rearrangements),
        ("moved_experts", "Experts that workers got from others.", stats.num_moved),
    ):
        counter = CounterMetricFamily(f"tandem_eplb_{name}", text, labels=labels)
        counter.add_metric(values, count)
        yield counter
