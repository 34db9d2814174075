"""Writes four-bit floats out as plain numbers, for one GEMM of the library.

As with `int4_dequantise`, that is the faster way where rows are many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gemm.fp4_numbers import NVFP4_TILE, fp4_weights, tile_places
from tandem_kernels.gemm.fp4_tiles import SIDE

_COLUMN_TILES = 2
_NUM_WARPS = 4


@triton.jit
def fp4_dequantise_kernel(
    tiles: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    num_inputs: tl.tensor,
    num_tile_columns: tl.tensor,
    COLUMN_TILES: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes, in program (i, b), tiles b * COLUMN_TILES and on of outputs 64 * i and on."""
    kind: tl.constexpr = out.dtype.element_ty
    tile_row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * COLUMN_TILES
    inside = first + tl.arange(0, COLUMN_TILES) < num_tile_columns
    places = tile_places(tiles, tile_row, num_tile_columns, COLUMN_TILES, TILE) + first * TILE
    weights = fp4_weights(
        places, inside, kind, 1, COLUMN_TILES, False, False, IN_PAIRS, False, TILE
    )
    col = tl.program_id(0) * 64 + tl.arange(0, 64)
    if TILE == NVFP4_TILE:
        weights = (weights.to(tl.float32) * tl.load(factors + col)[:, None]).to(kind)
    k = first * 64 + tl.arange(0, 64 * COLUMN_TILES)
    to = out + col.to(tl.int64)[:, None] * num_inputs + k[None, :]
    tl.store(to, weights, mask=(k < num_inputs)[None, :])


def fp4_dequantise(
    tiles: Tensor, factors: Tensor | None, num_inputs: int, dtype: torch.dtype
) -> Tensor:
    """See `reference.fp4.fp4_dequantise`."""
    num_rows, num_columns, tile_words = tiles.shape
    out = torch.empty((num_rows * SIDE, num_inputs), dtype=dtype, device=tiles.device)
    fp4_dequantise_kernel[(num_rows, triton.cdiv(num_columns, _COLUMN_TILES))](
        tiles,
        factors,
        out,
        num_inputs,
        num_columns,
        COLUMN_TILES=_COLUMN_TILES,
        IN_PAIRS=tiles.is_cuda and dtype == torch.bfloat16,
        TILE=tile_words,
        num_warps=_NUM_WARPS,
    )
    return out
