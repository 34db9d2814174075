"""Runs 100,000 random moves with drafts of all qualities: see `planted_traffic`."""

from __future__ import annotations

from tests.engine.sched.planted_traffic import run_planted


def test_a_hundred_thousand_moves_end_with_nothing_left() -> None:
    totals = run_planted(100_000)
    assert totals.num_moves >= 100_000
    assert min(totals.num_preemptions, totals.num_aborts, totals.num_resets) >= 20, totals
    assert all(totals.counts[count] >= 20 for count in range(1, 9)), totals
