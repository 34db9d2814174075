"""Tests that counters are there before their first event: `increase` sees nothing of a series that
appears with it, so an alert would miss the first burst. Times between tokens can be read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from decode_node.metrics import DecodeMetrics
from engine.node.metrics.engine_metrics import ITL_BUCKETS
from prefill_node.metrics import PrefillMetrics
from router.config import RouterSettings
from router.make_services import OuterWorld, make_services
from tests.decode_node.test_traces import tiny_config

LATER = {
    "tandem_router_node_answers",
    "tandem_router_model_requests",
    "tandem_router_tenant_requests",
    "tandem_router_time_to_first_byte_seconds",
    "tandem_missing_tokens",
    "tandem_plaintext_connections",
}
"""Counts of nodes and models are there as soon as these are known; of tenants, who may be many,
when they call; of callers without credentials, while a setting accepts them."""


def samples(registry: CollectorRegistry, kind: str) -> Iterator[tuple[str, list[float]]]:
    """Yields each family's name and the values of its counts."""
    ends = ("_total",) if kind == "counter" else ("_count",)
    for family in registry.collect():
        if family.type == kind:
            yield (
                family.name,
                [sample.value for sample in family.samples if sample.name.endswith(ends)],
            )


@pytest.mark.parametrize("kind", ["counter", "histogram"])
@pytest.mark.parametrize("service", ["router", "decode", "prefill"])
def test_every_series_that_events_change_is_there_from_the_beginning(
    service: str, kind: str
) -> None:
    if service == "router":
        services = make_services(RouterSettings(_cli_parse_args=[]), OuterWorld())
        registry = services.metrics.registry
    elif service == "decode":
        registry = DecodeMetrics(tiny_config()).registry
    else:
        registry = PrefillMetrics(tiny_config()).registry
    found = dict(samples(registry, kind))
    assert found
    without = {name for name, values in found.items() if not values}
    assert without <= LATER
    assert not any(any(values) for name, values in found.items() if name != "process_cpu_seconds")


def test_times_between_tokens_are_told_apart_where_decode_steps_are() -> None:
    """Of a step of 4.4 ms (one row) and of 16.7 ms (256 rows) a quantile is wrong by a quarter at
    the most."""
    for step_s in (0.0033, 0.0044, 0.0051, 0.0072, 0.0101, 0.0167, 0.027):
        above = next(bound for bound in ITL_BUCKETS if bound >= step_s)
        below = max(bound for bound in (0.0, *ITL_BUCKETS) if bound < step_s)
        assert above - below <= 0.26 * above
