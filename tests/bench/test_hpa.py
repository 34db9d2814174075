"""The HorizontalPodAutoscaler that the signal is compared with does what Kubernetes' does."""

from __future__ import annotations

import random

import pytest

from bench.router.autoscaling import Scaler, compare, make_traffic, run, scalers
from bench.router.hpa import DEFAULT_DOWN, Hpa, Rules, ScalingPolicy


def test_the_wish_is_the_metric_over_the_target() -> None:
    assert Hpa(target=2).decide(0, 3, 9.0) == 5
    assert Hpa(target=2).decide(0, 3, 8.0) == 4


def test_a_tenth_is_tolerated() -> None:
    """Ten pods: 10.9 and 9.1 are within a tenth of the target, 11.1 is not."""
    hpa = Hpa(target=1)
    assert [hpa.decide(at, 10, total) for at, total in ((0, 10.9), (1, 9.1))] == [10, 10]
    assert hpa.decide(2, 10, 11.1) == 12


def test_no_metric_changes_nothing() -> None:
    assert Hpa(target=1).decide(0, 7, None) == 7


def test_growth_is_limited_by_the_policy_that_allows_most() -> None:
    """Four pods or as many again in 15 s: 1 → 5, then 5 → 10, 15 s later."""
    hpa = Hpa(target=1)
    assert hpa.decide(0, 1, 50.0) == 5
    assert hpa.decide(10, 5, 50.0) == 5, "the period of 15 s has not passed"
    assert hpa.decide(15, 5, 50.0) == 10
    assert hpa.decide(30, 10, 50.0) == 20


def test_shrinking_waits_for_the_greatest_wish_of_five_minutes() -> None:
    hpa = Hpa(target=1)
    assert hpa.decide(0, 10, 10.0) == 10
    assert hpa.decide(15, 10, 2.0) == 10
    assert hpa.decide(285, 10, 4.0) == 10
    assert hpa.decide(300, 10, 2.0) == 4, "of the last 300 s the greatest wish is 4"
    assert hpa.decide(600, 4, 2.0) == 2


def test_shrinking_one_pod_in_five_minutes() -> None:
    down = Rules(0.0, (ScalingPolicy("Pods", 1, 300.0),))
    hpa = Hpa(target=1, down=down)
    sizes, now = [10], 0.0
    for _ in range(44):
        sizes.append(hpa.decide(now, sizes[-1], 1.0))
        now += 15
    assert sizes[1] == 9 and sizes[20] == 9 and sizes[21] == 8 and sizes[41] == 7


def test_half_of_the_pods_in_a_minute() -> None:
    hpa = Hpa(target=1, down=Rules(0.0, (ScalingPolicy("Percent", 50, 60.0),)))
    assert hpa.decide(0, 9, 1.0) == 4
    assert hpa.decide(30, 4, 1.0) == 4
    assert hpa.decide(60, 4, 1.0) == 2


def test_bounds_hold() -> None:
    hpa = Hpa(target=1, min_replicas=2, max_replicas=6, down=Rules(0, DEFAULT_DOWN.policies))
    assert hpa.decide(0, 5, 99.0) == 6
    assert hpa.decide(15, 6, 0.0) == 2


def test_more_of_the_metric_never_gives_fewer_pods() -> None:
    rng = random.Random(2)
    for _ in range(300):
        size, low = rng.randrange(1, 20), rng.random() * 30
        high = low + rng.random() * 10
        assert Hpa(target=1).decide(0, size, low) <= Hpa(target=1).decide(0, size, high)


@pytest.mark.parametrize("kind", ["slo", "busy", "backlog"])
def test_a_scaled_cluster_answers_everything(kind: str) -> None:
    """Two minutes of the day: every request is answered, and what is paid for is at least what
    stood there from the beginning."""
    scaler: Scaler = next(found for found in scalers() if found.kind == kind)
    traffic = make_traffic("step", part=0.04)
    found = run(scaler, traffic)
    assert found["requests"] == len(traffic.arrivals) and 0.5 < found["attained"] <= 1
    assert found["gpu_hours"] >= (found["prefill_hours"] + found["decode_hours"]) * 0.999
    assert found["prefill_hours"] > 0.03 and found["decode_hours"] > 0.03
    assert compare([found]) == [] or kind == "slo"
