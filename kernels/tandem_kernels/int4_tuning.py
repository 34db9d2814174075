"""How GEMMs with 4-bit weights run best, by their shape; found by measurement
(`python -m bench.engine.int4 --tune`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Int4Tuning:
    """Says how one shape runs.

    Attributes:
        rows, cols: Of a tile: tokens, and outputs.
        splits: Parts of the inner dimension, which different programs take.
        swapped: The weights are the first operand, from registers: then four warps multiply
            together on Hopper, and `cols` must be 64 or more there.
        ahead: So many times 128 bytes of each output are brought into the cache before the
            predecessor has ended; a power of two, or 0.
    """

    rows: int
    cols: int
    splits: int
    swapped: bool
    num_warps: int
    num_stages: int
    ahead: int = 0


FIXED = Int4Tuning(rows=64, cols=64, splits=1, swapped=True, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""

_PROGRAMS = {16: 400, 32: 400, 64: 264, 128: 132}
"""As many as fit on the SMs of a Hopper at once, by the rows of a tile."""
_STAGES = {16: 4, 32: 3, 64: 2, 128: 2}
_LEAST_BLOCKS = 4
"""A part is never shorter."""
_AHEAD_ROWS = 64
"""The largest number: with more, kernels are long, and what comes before them too."""


def int4_tuning(num_rows: int, num_outputs: int, inner: int, *, gated: bool) -> Int4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs].

    Args:
        gated: Two outputs are computed for each column.
    """
    rows = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    cols, num_warps = (64, 4) if rows <= 64 else (128, 8)
    strips = -(-num_outputs // cols) * -(-num_rows // rows)
    splits = max(1, min(8, _PROGRAMS[rows] // strips, inner // 256 // _LEAST_BLOCKS))
    return Int4Tuning(
        rows,
        cols,
        splits=1 if gated else splits,
        swapped=True,
        num_warps=num_warps,
        num_stages=_STAGES[rows],
        ahead=8 if num_rows <= _AHEAD_ROWS else 0,
    )
