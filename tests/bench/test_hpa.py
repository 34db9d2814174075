"""The autoscaler's algorithm does what Kubernetes documents of autoscaling/v2."""

from __future__ import annotations

import pytest

from bench.hpa import (
    SYNC_PERIOD_S,
    AutoscalerSpec,
    AverageValue,
    HorizontalPodAutoscaler,
    ScalingPolicy,
    ScalingRules,
)

AT_ONCE = ScalingRules(stabilization_s=0.0)


def plain(low: int = 1, high: int = 100) -> HorizontalPodAutoscaler:
    spec = AutoscalerSpec(min_replicas=low, max_replicas=high, scale_up=AT_ONCE, scale_down=AT_ONCE)
    return HorizontalPodAutoscaler(spec)


@pytest.mark.parametrize(
    ("total", "current", "wanted"),
    [(8.0, 4, 4), (8.1, 4, 4), (8.79, 4, 4), (8.81, 4, 5), (7.3, 4, 4), (7.1, 4, 4), (5.9, 4, 3),
     (20.0, 4, 10), (0.0, 4, 1), (2000.0, 4, 100)],
)  # fmt: skip
def test_replicas_that_bring_the_average_to_its_target(
    total: float, current: int, wanted: int
) -> None:
    """Ratios within a tenth change nothing; what is more is rounded up."""
    assert plain().desire(0.0, current, [AverageValue(total, 2.0)]) == wanted


def test_the_metric_that_wants_most_counts_and_one_that_is_blind_forbids_less() -> None:
    high, low = AverageValue(20.0, 2.0), AverageValue(2.0, 2.0)
    blind = AverageValue(None, 2.0)
    assert plain().desire(0.0, 4, [low, high]) == 10
    assert plain().desire(0.0, 4, [low, blind]) == 4
    assert plain().desire(0.0, 4, [high, blind]) == 10
    assert plain().desire(0.0, 4, [blind]) == 4


def test_bounds_come_before_metrics_and_zero_is_off() -> None:
    blind = [AverageValue(None, 2.0)]
    assert plain(low=3, high=5).desire(0.0, 1, blind) == 3
    assert plain(low=3, high=5).desire(0.0, 9, blind) == 5
    assert plain(low=3).desire(0.0, 0, [AverageValue(20.0, 2.0)]) == 0


def run(
    spec: AutoscalerSpec, start: int, demand: dict[float, float], until_s: float
) -> dict[float, int]:
    """Returns when the number changed, and to what. `demand`: pods needed, from a time on."""
    scaler, current, changes = HorizontalPodAutoscaler(spec), start, {}
    now_s = 0.0
    while now_s <= until_s:
        needed = next(v for at, v in reversed(demand.items()) if at <= now_s)
        wanted = scaler.desire(now_s, current, [AverageValue(needed, 1.0)])
        if wanted != current:
            changes[now_s] = current = wanted
        now_s += SYNC_PERIOD_S
    return changes


def test_policies_bound_the_pace_and_windows_the_way_down() -> None:
    one_a_minute = ScalingRules(stabilization_s=0.0, policies=(ScalingPolicy("Pods", 1, 60.0),))
    slowly = ScalingRules(stabilization_s=120.0, policies=(ScalingPolicy("Pods", 1, 300.0),))
    spec = AutoscalerSpec(min_replicas=1, max_replicas=4, scale_up=one_a_minute, scale_down=slowly)
    changes = run(spec, 1, {0.0: 9.0, 300.0: 1.0}, 1500.0)
    assert changes == {0.0: 2, 60.0: 3, 120.0: 4, 405.0: 3, 705.0: 2, 1005.0: 1}


def test_the_defaults_double_at_most_and_wait_five_minutes_to_shrink() -> None:
    spec = AutoscalerSpec(min_replicas=1, max_replicas=50)
    changes = run(spec, 6, {0.0: 40.0, 60.0: 2.0}, 600.0)
    assert changes == {0.0: 12, 15.0: 24, 30.0: 40, 345.0: 2}


def test_a_dip_shorter_than_the_window_is_not_followed() -> None:
    spec = AutoscalerSpec(min_replicas=1, max_replicas=50)
    assert run(spec, 8, {0.0: 8.0, 30.0: 2.0, 270.0: 8.0, 300.0: 2.0}, 500.0) == {}
