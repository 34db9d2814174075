"""Parts of kernels whose programs, as many as SMs, walk over the tiles of a product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of_tile(
    tile: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILES_DOWN: tl.constexpr,
) -> tl.tensor:
    """Returns the first row and the first column of a tile; there are `down` x `across`. TILES_DOWN
    rows of tiles are computed together, column by column: what they share stays in the L2 cache.
    """
    first = tile // (TILES_DOWN * across) * TILES_DOWN
    height = tl.minimum(down - first, TILES_DOWN)
    within = tile % (TILES_DOWN * across)
    row = (first + within % height) * ROWS
    return row, within // height * COLS


@triton.jit
def rounded(x: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr) -> tl.tensor:
    """Rounds float32 to `kind`. In pairs, because conversions of single numbers to bfloat16, which
    the compiler would take, are as slow as exponentials.
    """
    if IN_PAIRS:
        x = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(kind)
