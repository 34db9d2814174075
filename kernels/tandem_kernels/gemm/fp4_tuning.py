"""How GEMMs with four-bit floats run best, by their shape (`tunings/*/fp4.json`;
`python -m bench.engine.gemms --formats nvfp4 --tune` tries others)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem_kernels.tunings.table import TuningTable


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
    """Says how programs compute their tile, and how many of them the SMs should have at once, at
    most what fits."""

    tuning: Fp4Tuning
    programs: int


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Holds tiles, of which the one is taken that leaves the fewest places for programs empty.
    Parts are more where rows are few: those of many take longer to sum.

    Attributes:
        most_splits, least_inputs: Parts of the inner dimension, and inputs of each.
    """

    tiles: tuple[_Tile, ...]
    most_splits: int
    least_inputs: int


def _split(taken: _Tiles, num_rows: int, num_outputs: int, inner: int, gated: bool) -> Fp4Tuning:
    def fitted(tile: _Tile) -> tuple[float, Fp4Tuning]:
        strips = -(-num_outputs // tile.tuning.cols) * -(-num_rows // tile.tuning.rows)
        most = min(taken.most_splits, tile.programs // strips, inner // taken.least_inputs)
        splits = 1 << max(0, most.bit_length() - 1)
        turns = strips * splits / tile.programs
        return turns / -(-turns // 1), replace(tile.tuning, splits=splits)

    return max(map(fitted, taken.tiles), key=lambda found: found[0])[1]


_TABLE = TuningTable("fp4", _Tiles, ("num_rows", "num_outputs", "inner", "gated"), _split)


def fp4_tuning(
    device: torch.device, num_rows: int, num_outputs: int, inner: int, *, gated: bool
) -> Fp4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs]; `gated`: gate and up, whose
    outputs count once."""
    return _TABLE.choose(device, num_rows, num_outputs, inner, gated)
