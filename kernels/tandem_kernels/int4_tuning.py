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
    """

    rows: int
    cols: int
    splits: int
    swapped: bool
    num_warps: int
    num_stages: int


FIXED = Int4Tuning(rows=64, cols=64, splits=1, swapped=True, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""

_PROGRAMS = 264
"""Two for each SM."""
_LEAST_BLOCKS = 4
"""A part is never shorter."""


def int4_tuning(num_rows: int, num_outputs: int, inner: int, *, gated: bool) -> Int4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs].

    Args:
        gated: Two outputs are computed for each column.
    """
    rows = next((size for size in (16, 32, 64, 128) if num_rows <= size), 128)
    if rows <= 16:
        cols, swapped = 32, False
    else:
        cols, swapped = 64, True
    strips = -(-num_outputs // cols) * -(-num_rows // rows)
    splits = max(1, min(8, _PROGRAMS // strips, inner // 256 // _LEAST_BLOCKS))
    stages = {16: 5, 32: 4, 64: 3, 128: 2}[rows]
    if gated:
        splits = 1
    return Int4Tuning(rows, cols, splits, swapped, num_warps=4, num_stages=stages)
