"""The default policy on clusters in virtual time: what no state of a single moment shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.router.simulated_case import Case, run
from bench.router.simulation import batches, uncached
from router.placement.choose_policy import PolicyName

COUNT = 1500


def cases(label: str, load: float, num_prefill: int, workload: str) -> dict[PolicyName, Case]:
    return {
        case.policy: replace(case, count=COUNT)
        for case in uncached()
        if case.label.endswith(label)
        and (case.load, case.shape.num_prefill, case.workload) == (load, num_prefill, workload)
    }


@pytest.mark.parametrize(
    ("label", "load", "num_prefill", "workload"),
    [
        ("1 routers", 0.9, 2, "equal"),
        ("4 routers", 0.9, 8, "mixed"),
        ("2 of half the speed", 0.9, 8, "equal"),
    ],
)
def test_prompts_that_no_node_has_wait_no_longer_than_by_least_load(
    label: str, load: float, num_prefill: int, workload: str
) -> None:
    found = cases(label, load, num_prefill, workload)
    ours, least = run(found[PolicyName.TANDEM]), run(found[PolicyName.LEAST_LOADED])
    assert ours["ttft_mean_s"] <= 1.05 * least["ttft_mean_s"]
    assert ours["ttft_p99_s"] <= 1.15 * least["ttft_p99_s"]


def test_a_batch_beside_takes_little_of_the_time_to_the_first_token() -> None:
    """One prefill node, and one decode node whose steps have room for prompts of both."""
    alone, beside = (
        run(replace(case, count=COUNT))
        for case in batches()
        if case.shape.itl_objective_s and (case.load, case.shape.num_prefill) == (0.6, 1)
    )
    assert beside["batch_tokens_per_s"] > 2000 and not alone["batch_tokens_per_s"]
    assert beside["ttft_mean_s"] <= 1.02 * alone["ttft_mean_s"]
    assert beside["ttft_p99_s"] <= 1.02 * alone["ttft_p99_s"]
