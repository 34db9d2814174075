"""Tests of how a bench's ranks are started and ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.engine.ranks.processes import run_ranks


def write_rank(rank: int, folder: Path, *, text: str) -> None:
    (folder / str(rank)).write_text(text)


def fail_or_wait(rank: int, folder: Path) -> None:
    """Rank 0 waits for longer than a test may take; rank 1 fails once rank 0 waits."""
    waiting = folder / "waiting"
    if rank == 0:
        waiting.touch()
        time.sleep(3600)
    while not waiting.exists():
        time.sleep(0.01)
    sys.exit("rank 1 cannot go on")


def test_every_rank_runs_with_what_it_was_given(tmp_path):
    assert run_ranks(2, write_rank, tmp_path, text="here") == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": "here",
        "1": "here",
    }


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path):
    assert run_ranks(2, fail_or_wait, tmp_path) == 1
