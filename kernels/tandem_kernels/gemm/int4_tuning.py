"""How GEMMs with 4-bit weights run best, by their shape; found by measurement
(`python -m bench.engine.gemms --formats int4 --tune`)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Int4Tuning:
    """Says how one shape runs.

    Attributes:
        rows, cols: Of a tile: tokens, and outputs.
        splits: Parts of the inner dimension, which different programs take.
        swapped: The weights are the first operand, from registers: then four warps multiply
            together on Hopper, and `cols` must be 64 or more there.
        ahead: This many times 128 bytes of each output are brought into the cache before the
            predecessor has ended; a power of two, or 0.
        late: Scales multiply the sums of a group in place of its weights.
        pieces: A block is multiplied in this many turns of the loop, 1, 2 or 4.
    """

    rows: int
    cols: int
    splits: int
    swapped: bool
    num_warps: int
    num_stages: int
    ahead: int = 0
    late: bool = False
    pieces: int = 1


FIXED = Int4Tuning(64, 64, splits=1, swapped=True, num_warps=4, num_stages=3, late=True)
"""One choice for all batches, where a row must have the same bits in any company."""

_TILES = {
    8: Int4Tuning(8, 32, 1, True, num_warps=1, num_stages=4, ahead=8, late=True),
    16: Int4Tuning(16, 32, 1, True, num_warps=1, num_stages=3, ahead=8, late=True),
    32: Int4Tuning(32, 64, 1, True, num_warps=4, num_stages=3, ahead=8, late=True),
    64: Int4Tuning(64, 64, 1, True, num_warps=4, num_stages=3, ahead=8, late=True),
    128: Int4Tuning(128, 128, 1, True, num_warps=8, num_stages=2, ahead=8, pieces=2),
}
"""Holds the tiles by their largest number of rows. With few a warp works for itself."""
_GATED_64 = Int4Tuning(64, 128, 1, True, num_warps=8, num_stages=2)
_PROGRAMS = {8: 1056, 16: 900, 32: 396, 64: 264, 128: 132}
"""This many fit on the SMs of a Hopper at once."""
_NARROW_128 = {
    132: Int4Tuning(128, 64, 1, True, num_warps=4, num_stages=3),
    264: Int4Tuning(128, 64, 1, True, num_warps=4, num_stages=3, ahead=8, late=True, pieces=2),
}
"""Tiles for outputs so few that halves of the inner dimension are a program each, by how many
programs fit at once."""
_LEAST_BLOCKS = 4
"""A part of the inner dimension is never shorter."""


def int4_tuning(num_rows: int, num_outputs: int, inner: int, *, gated: bool) -> Int4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs].

    Args:
        gated: Two outputs are computed for each column.
    """
    rows = next((size for size in _TILES if num_rows <= size), 128)
    width = num_outputs * (1 + gated)
    tile, programs = _tile(rows, width, gated=gated)
    strips = -(-width // tile.cols) * -(-num_rows // rows)
    most = min(8, programs // strips, inner // 256 // _LEAST_BLOCKS)
    return replace(tile, splits=1 << max(0, most.bit_length() - 1))


def _tile(rows: int, width: int, *, gated: bool) -> tuple[Int4Tuning, int]:
    """Returns the tile of this many rows, and how many of its programs run at once. `width`:
    outputs of the weights."""
    if rows == 64 and gated:
        return _GATED_64, _PROGRAMS[64]
    for programs, tile in _NARROW_128.items() if rows == 128 else ():
        if 2 * (width // tile.cols) <= programs:
            return tile, programs
    return _TILES[rows], _PROGRAMS[rows]
