"""Asks for MXFP4 tiles on their way to the L2 cache before anybody loads them (Hopper and later).

One instruction of a thread asks for a whole tile and waits for nothing. Loads that follow find it
on its way or there, and need no longer be many at once for memory to be busy.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ASK = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0;"
    " @wanted cp.async.bulk.prefetch.L2.global [$1], 2176; mov.b32 $0, 0; }"
)
"""Asks for 2176 bytes, a tile of 544 words."""


@triton.jit
def ask_for_tiles(
    tiles: tl.tensor, first: tl.tensor, end: tl.tensor, THREADS: tl.constexpr
) -> None:
    """Asks for tiles `first` to `end` - 1 of those that begin at `tiles`, one a thread."""
    lane = tl.arange(0, THREADS)
    for start in range(first, end, THREADS):
        tile = start + lane
        place = tiles + tl.minimum(tile, end - 1).to(tl.int64) * 544
        wanted = (tile < end).to(tl.int32)
        tl.inline_asm_elementwise(_ASK, "=r,l,r", [place, wanted], tl.int32, False, 1)


@triton.jit
def ask_for_own(
    weight: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    num_tile_rows: tl.tensor,
    num_tile_columns: tl.tensor,
    ROW_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Asks for tile columns `first` to `end` - 1, as far as there are any, of the ROW_TILES rows of
    tiles that program (j, ...) multiplies, in each of PARTS weights of `size` words."""
    last = tl.minimum(end, num_tile_columns)
    for i in tl.static_range(ROW_TILES):
        row = tl.minimum(tl.program_id(0) * ROW_TILES + i, num_tile_rows - 1) * num_tile_columns
        for part in tl.static_range(PARTS):
            ask_for_tiles(weight + part * size, row + first, row + last, THREADS)


@triton.jit
def ask_for_share(
    weight: tl.tensor,
    expert: tl.tensor,
    num_tiles: tl.tensor,
    SPLITS: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Asks, in program (j, s, ...), for its share of an expert's `num_tiles`."""
    share = tl.cdiv(num_tiles, tl.num_programs(0) * SPLITS)
    first = (tl.program_id(0) * SPLITS + tl.program_id(1)) * share
    own = weight + expert.to(tl.int64) * num_tiles * 544
    ask_for_tiles(own, first, tl.minimum(first + share, num_tiles), THREADS)
