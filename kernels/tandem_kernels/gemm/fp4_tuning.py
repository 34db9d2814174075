"""How GEMMs with four-bit floats run best, by their shape
(`python -m bench.engine.fp4 --tune` tries others)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Fp4Tuning:
    """Says how one shape runs.

    Attributes:
        rows, cols, depth: Of a tile: tokens, outputs, and inputs at once; the last two are
            multiples of 64. With fewer than four warps each multiplies by itself.
        splits: Parts of the inner dimension, which different programs take.
        ahead: This many times 128 bytes of each 64 outputs are brought into the cache before the
            predecessor has ended; a power of two, or 0.
    """

    rows: int
    cols: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int
    ahead: int = 0


FIXED = Fp4Tuning(64, 64, 64, splits=1, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""

_TILES = {
    8: Fp4Tuning(8, 64, 64, 1, num_warps=2, num_stages=5, ahead=256),
    16: Fp4Tuning(16, 64, 64, 1, num_warps=2, num_stages=5, ahead=256),
    32: Fp4Tuning(32, 64, 64, 1, num_warps=4, num_stages=4, ahead=256),
    64: Fp4Tuning(64, 64, 64, 1, num_warps=4, num_stages=4, ahead=256),
    128: Fp4Tuning(128, 64, 64, 1, num_warps=4, num_stages=3),
}
"""Holds the tiles by their largest number of rows."""
_PROGRAMS = {8: 1056, 16: 900, 32: 396, 64: 264, 128: 132}
"""This many fit on the SMs of a Hopper at once."""
_LEAST_STEPS = 4
"""A part of the inner dimension is never shorter."""


def fp4_tuning(num_rows: int, num_outputs: int, inner: int) -> Fp4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs]; gate·up counts its outputs
    once."""
    rows = next((size for size in _TILES if num_rows <= size), 128)
    tile = _TILES[rows]
    strips = -(-num_outputs // tile.cols) * -(-num_rows // rows)
    most = min(8, _PROGRAMS[rows] // strips, inner // tile.depth // _LEAST_STEPS)
    return replace(tile, splits=1 << max(0, most.bit_length() - 1))
