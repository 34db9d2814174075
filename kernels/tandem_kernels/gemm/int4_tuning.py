"""How GEMMs with 4-bit weights run best, by their shape (`tunings/*/int4.json`;
`python -m bench.engine.gemms --formats int4 --tune` tries others)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem_kernels.tunings.table import TuningTable


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


@dataclass(frozen=True, slots=True)
class _Tile:
    """Says how programs compute their tile, and how many of them the SMs have room for at once.

    Attributes:
        most_splits, least_blocks: Parts of the inner dimension, and blocks of 256 inputs of each.
    """

    tuning: Int4Tuning
    programs: int
    most_splits: int
    least_blocks: int


def _split(
    taken: _Tile, num_rows: int, num_outputs: int, inner: int, gated: bool, width: int
) -> Int4Tuning:
    tile = taken.tuning
    strips = -(-width // tile.cols) * -(-num_rows // tile.rows)
    most = min(taken.most_splits, taken.programs // strips, inner // 256 // taken.least_blocks)
    return replace(tile, splits=1 << max(0, most.bit_length() - 1))


_TABLE = TuningTable("int4", _Tile, ("num_rows", "num_outputs", "inner", "gated", "width"), _split)


def int4_tuning(
    device: torch.device, num_rows: int, num_outputs: int, inner: int, *, gated: bool
) -> Int4Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs].

    Args:
        gated: Two outputs are computed for each column.
    """
    width = num_outputs * (1 + gated)  # outputs of the weights
    return _TABLE.choose(device, num_rows, num_outputs, inner, gated, width)
