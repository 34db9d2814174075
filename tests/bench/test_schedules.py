"""Tests of the model of schedules, by what can be counted by hand."""

from __future__ import annotations

import pytest

from bench.engine.schedules import Assumption, simulate


def test_every_token_is_computed_once_whatever_the_steps() -> None:
    """Counts GEMMs of steps with prompts: 6 of 2000 tokens, answers of 5; 676 TFLOP/s, 13.96
    GFLOP a token, of prompts and of decodes beside them."""
    taken, steps = simulate(Assumption("", step_tokens=4096), 6, 2000, 5)
    # Two prompts end in the first step, and two more in the second: so many decode in the next.
    assert steps == {"prefill": 1, "mixed": 2, "decode": 4}
    beside = 2 + 4
    assert taken["GEMMs"] == pytest.approx((6 * 2000 + beside) * 13.96e9 / 676e12, rel=1e-3)
    faster, _ = simulate(Assumption("", step_tokens=4096, gemm_rate=2.0, hidden=1.0), 6, 2000, 5)
    assert faster["GEMMs"] == pytest.approx(taken["GEMMs"] / 2)
    assert faster["contexts"] < taken["contexts"]
