"""How GEMMs with four-bit floats run best, by their shape
(`python -m bench.engine.gemms --formats nvfp4 --tune` tries others)."""

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


@dataclass(frozen=True, slots=True)
class _Tile:
    """Says how programs compute their tile, and how many of them the SMs of a Hopper should have at
    once, at most what fits."""

    tuning: Fp4Tuning
    programs: int


_TILES = {
    (8, False): (_Tile(Fp4Tuning(8, 64, 256, 1, 2, 3, ahead=64), 1056),),
    (8, True): (_Tile(Fp4Tuning(8, 64, 64, 1, 2, 3), 1056),),
    (16, False): (_Tile(Fp4Tuning(16, 64, 128, 1, 2, 3, ahead=32), 1056),),
    (16, True): (_Tile(Fp4Tuning(16, 64, 128, 1, 4, 3, ahead=32), 1056),),
    (32, False): (
        _Tile(Fp4Tuning(32, 64, 128, 1, 4, 3, ahead=256), 660),
        _Tile(Fp4Tuning(32, 64, 256, 1, 4, 3, ahead=256), 396),
    ),
    (32, True): (_Tile(Fp4Tuning(32, 128, 128, 1, 4, 4, ahead=256), 264),),
    (64, False): (
        _Tile(Fp4Tuning(64, 64, 128, 1, 4, 4, ahead=256), 264),
        _Tile(Fp4Tuning(64, 64, 128, 1, 4, 3, ahead=256), 396),
    ),
    (64, True): (_Tile(Fp4Tuning(64, 64, 128, 1, 4, 4, ahead=256), 264),),
    (128, False): (
        _Tile(Fp4Tuning(128, 64, 128, 1, 4, 3, ahead=256), 264),
        _Tile(Fp4Tuning(128, 64, 128, 1, 4, 4, ahead=256), 132),
    ),
    (128, True): (_Tile(Fp4Tuning(128, 64, 64, 1, 4, 3, ahead=256), 264),),
}
"""Holds the tiles by their largest number of rows, and whether they are of gate and up. Of several,
the one is taken that leaves the fewest places for programs empty."""
_FEW_ROWS = 16
_MOST_SPLITS = {True: 16, False: 8}
"""Parts are more where rows are few: those of many take longer to sum."""
_LEAST_INPUTS = 256
"""A part of the inner dimension is never shorter."""


def fp4_tuning(num_rows: int, num_outputs: int, inner: int, *, gated: bool) -> Fp4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs]; `gated`: gate and up, whose
    outputs count once."""
    rows = next((size for size, _ in _TILES if num_rows <= size), 128)
    strips_down = -(-num_rows // rows)

    def split(tile: _Tile) -> tuple[float, Fp4Tuning]:
        strips = -(-num_outputs // tile.tuning.cols) * strips_down
        most = _MOST_SPLITS[rows <= _FEW_ROWS]
        most = min(most, tile.programs // strips, inner // _LEAST_INPUTS)
        splits = 1 << max(0, most.bit_length() - 1)
        turns = strips * splits / tile.programs
        return turns / -(-turns // 1), replace(tile.tuning, splits=splits)

    return max(map(split, _TILES[rows, gated]), key=lambda found: found[0])[1]
