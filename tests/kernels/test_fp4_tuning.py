"""How GEMMs with four-bit floats are cut into programs."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem_kernels.gemm.fp4_tuning import fp4_tuning

CPU = torch.device("cpu")
"""Takes the general table."""


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 64, 65, 128, 300])
def test_parts_are_worth_a_program(rows: int) -> None:
    """Parts of the inner dimension are powers of two, of no less than 256 inputs, and no more than
    the SMs have places for; where outputs fill these, there is one part."""
    for outputs, inner, gated in itertools.product(
        (64, 4096, 14336, 128256), (64, 2880, 4096, 14336), (False, True)
    ):
        found = fp4_tuning(CPU, rows, outputs, inner, gated=gated)
        assert found.rows >= min(rows, 128) and found.depth % 64 == found.cols % 64 == 0
        assert found.splits in (1, 2, 4, 8, 16)
        assert found.splits == 1 or inner // found.splits >= 256
        programs = -(-outputs // found.cols) * -(-rows // found.rows) * found.splits
        assert found.splits == 1 or programs <= 2112
        assert found.splits == 1 or outputs < 128256


def test_tiles_are_those_that_leave_the_fewest_places_empty() -> None:
    """Strips of outputs, if 96, fill 396 places in four parts, and 264 in two; 64 fill these."""
    assert fp4_tuning(CPU, 64, 6144, 4096, gated=False).splits == 4
    assert fp4_tuning(CPU, 64, 6144, 4096, gated=False).num_stages == 3
    assert fp4_tuning(CPU, 64, 4096, 4096, gated=False).num_stages == 4
