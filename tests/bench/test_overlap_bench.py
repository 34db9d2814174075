"""Tests of the ways to sum over ranks beside computing, on two ranks over gloo."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from bench.engine import overlap
from bench.engine.ranks.overlap_ways import BegunSums, Way, spans_of
from tests.engine.models.conftest import free_ports

ARGUMENTS = Namespace(ranks=2, ctas=[0], tiny=True, eager=True, rounds=1, steps=1)


def rows_of_ranks() -> list[list[dict[str, object]]]:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(2))

    def of_rank(rank: int) -> list[dict[str, object]]:
        with torch.inference_mode():
            measurement = overlap.Measurement(ARGUMENTS, rank, addresses)
            return measurement.case("4 x 16", (16,) * 4) + measurement.case("64", (64,))

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(of_rank, range(2), timeout=60))


def test_ways_give_what_sums_one_after_the_other_give():
    for rows in rows_of_ranks():
        errors = {(row["case"], row["way"]): float(row["error"]) for row in rows}
        assert len(errors) == 2 * 7
        for (_, way), error in errors.items():
            assert error > 0.1 if way == "no sums" else error < 1e-5


def test_a_way_that_leaves_a_part_out_is_refused():
    """Half of the rows are summed, the others are not."""
    begin = BegunSums.begin

    def half(self: BegunSums, out: torch.Tensor, part: torch.Tensor) -> None:
        if self.way.kind != "tiles" or part.data_ptr() == out.data_ptr():
            begin(self, out, part)

    with patch.object(BegunSums, "begin", half), pytest.raises(SystemExit, match="tiles 2 is wr"):
        rows_of_ranks()


def test_halves_have_half_of_the_tokens():
    halves = Way("halves", 2)
    assert [
        [(s.prompt, s.num_computed, s.num_tokens) for s in piece]
        for piece in spans_of((8, 8, 8, 8), halves)
    ] == [[(0, 0, 8), (1, 0, 8)], [(2, 0, 8), (3, 0, 8)]]
    assert [
        [(s.num_computed, s.num_tokens) for s in piece] for piece in spans_of((9,), halves)
    ] == [[(0, 4)], [(4, 5)]]
