"""Tests the speed at which a backlog of prompts is computed, from steps of all sizes."""

from __future__ import annotations

import pytest

from engine.sched.counters import PrefillRate


def rate_of(*steps: tuple[int, float]) -> float:
    rate = PrefillRate()
    for num_tokens, seconds in steps:
        rate.add_step(num_tokens, seconds)
    return rate.tokens_per_s


def test_the_first_steps_of_a_process_say_nothing() -> None:
    assert rate_of() == 0
    assert rate_of((11, 5.0), (3, 2.0), (8, 1.0)) == 0


def test_equal_steps_give_their_rate() -> None:
    assert rate_of(*[(100, 0.05)] * 4) == pytest.approx(2000)


def test_small_steps_do_not_hide_how_quick_full_ones_are() -> None:
    """A step takes 10 ms whatever it computes, and each token 10 us."""
    small = [(16, 0.01016)] * 500
    found = rate_of(*[(8192, 0.09192)] * 2, *small)
    assert found > 0.9 * 8192 / 0.09192
    assert rate_of(*small) == pytest.approx(16 / 0.01016)


def test_a_delay_of_a_small_step_is_soon_outweighed() -> None:
    assert rate_of(*[(10, 3.0)] * 3, (1000, 0.1)) > 5000


def test_a_node_that_slows_down_is_noticed() -> None:
    quick, slow = [(4096, 0.1)] * 20, [(4096, 0.4)] * 20
    assert rate_of(*quick, *slow) == pytest.approx(4096 / 0.4, rel=0.1)
