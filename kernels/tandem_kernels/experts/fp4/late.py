"""Products of one row with MXFP4 weights whose powers of two multiply sums, not each weight.

A matrix unit multiplies eight rows at least, and here there is one. So its groups of 32 inputs take
turns: group g is in row g of the operand, whose other rows have zeros there, and the product has
the sum of each group in a column of its own. One multiplication by the group's power then stands
for 32 weights, and a thread needs the powers of its own sums alone.

    one turn: UNROLL tiles, [COLS, 64 * UNROLL] weights of 2 * UNROLL groups

Weights keep the exponent that they have in their word, 2 ** -126 of what they are. Rows are
multiplied by 2 ** 96 instead, which bfloat16 does exactly below 2 ** 31, and what comes out is
multiplied by 2 ** -96, because a tile's powers are 2 ** 126 of what they are.

It takes 2.3 instructions a weight instead of 3.1, gate and up by two warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.gemm.fp4_numbers import in_order_of_warps, in_place, tiny_mxfp4_numbers

_UP = tl.constexpr(2.0**96)
_DOWN = tl.constexpr(2.0**-96)


@triton.jit
def _tiny_weights(
    tiles: tl.tensor,
    inside: tl.tensor,
    kind: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Loads a tile of each row of tiles, [ROW_TILES] addresses -> [64 * ROW_TILES, 64], as
    `tiny_mxfp4_numbers` and in the order of one warp. EVEN: there is one."""
    ROW_TILES: tl.constexpr = tiles.shape[0]
    lane = tl.arange(0, 256)[None, :]
    if EVEN:
        first, second = tl.load(tiles[:, None] + lane), tl.load(tiles[:, None] + 256 + lane)
    else:
        first = tl.load(tiles[:, None] + lane, mask=inside, other=0)
        second = tl.load(tiles[:, None] + 256 + lane, mask=inside, other=0)
    first = first.reshape(ROW_TILES, 4, 8, 4, 2).permute(0, 1, 2, 4, 3)
    second = second.reshape(ROW_TILES, 4, 8, 4, 2).permute(0, 1, 2, 4, 3)
    first, second = first.reshape(32 * ROW_TILES, 2, 4), second.reshape(32 * ROW_TILES, 2, 4)
    return in_place(tiny_mxfp4_numbers(first, second, kind, IN_PAIRS), True)


@triton.jit
def _exponents(
    tiles: tl.tensor, turn: tl.tensor, num_tile_columns: tl.tensor, UNROLL: tl.constexpr
) -> tl.tensor:
    """Loads the words of exponents of a turn, [ROW_TILES, 32, 4]: zeros where there is no tile."""
    tile = tl.arange(0, 4)
    column = turn * UNROLL + tile
    real = (tile < UNROLL) & (column < num_tile_columns)
    places = tiles[:, None, None] + (column * 544)[None, None, :]
    word = 512 + tl.arange(0, 32)
    return tl.load(places + word[None, :, None], mask=real[None, None, :], other=0)


@triton.jit
def _powers(words: tl.tensor) -> tl.tensor:
    """Returns the powers of two of a turn's groups, [64 * ROW_TILES, 8] float32."""
    ROW_TILES: tl.constexpr = words.shape[0]
    words = words.reshape(ROW_TILES, 4, 1, 8, 4, 1)
    # Of the bytes of a word, the second dimension is that of outputs, the first that of inputs.
    shift = tl.arange(0, 2).reshape(1, 1, 2, 1, 1, 1) * 8
    shift += tl.arange(0, 2).reshape(1, 1, 1, 1, 1, 2) * 16
    bits = ((words >> shift) & 255) << 23
    return bits.reshape(64 * ROW_TILES, 8).to(tl.float32, bitcast=True)


@triton.jit
def late_products(
    inputs: tl.tensor,
    weight: tl.tensor,
    tile_row: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    inner: tl.tensor,
    num_tile_columns: tl.tensor,
    UNROLL: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Returns the sums of outputs over turns `first` to `end`, [64 * ROW_TILES] float32, and those
    of the second part of the weight, which is `size` words further.

    Args:
        inputs, weight: Where a row, and the tiles of a weight, begin.
        tile_row: [ROW_TILES], rows of tiles.

    EVEN: turns have no tiles or inputs that there are not.
    """
    kind: tl.constexpr = inputs.dtype.element_ty
    COLS: tl.constexpr = 64 * tile_row.shape[0]
    tiles = weight + tile_row.to(tl.int64) * num_tile_columns * 544
    row = tl.arange(0, 8)[:, None]
    lane = tl.arange(0, 64)[None, :]
    inputs += row * 0 + lane
    acc = tl.zeros([COLS, 8], tl.float32)
    second = tl.zeros([COLS, 8], tl.float32)
    # One turn ahead of their use: the compiler does so only for what is multiplied.
    ahead = _exponents(tiles, first, num_tile_columns, UNROLL)
    ahead2 = _exponents(tiles + size, first, num_tile_columns, UNROLL) if GATED else ahead
    for turn in range(first, end):
        groups = tl.zeros([COLS, 8], tl.float32)
        groups2 = tl.zeros([COLS, 8], tl.float32)
        powers, powers2 = _powers(ahead), _powers(ahead2)
        ahead = _exponents(tiles, turn + 1, num_tile_columns, UNROLL)
        ahead2 = _exponents(tiles + size, turn + 1, num_tile_columns, UNROLL) if GATED else ahead
        for tile in tl.static_range(UNROLL):
            column = turn * UNROLL + tile
            at = tiles + column * 544
            own = row == 2 * tile + lane // 32
            if not EVEN:
                own &= column * 64 + lane < inner
            given = tl.load(inputs + column * 64, mask=own, other=0.0) * _UP
            given = in_order_of_warps(given).T
            by = _tiny_weights(at, column < num_tile_columns, kind, EVEN, IN_PAIRS)
            groups = tl.dot(by, given, groups, input_precision=PRECISION)
            if GATED:
                by = _tiny_weights(at + size, column < num_tile_columns, kind, EVEN, IN_PAIRS)
                groups2 = tl.dot(by, given, groups2, input_precision=PRECISION)
        acc += groups * powers
        if GATED:
            second += groups2 * powers2
    return tl.sum(acc, axis=1) * _DOWN, tl.sum(second, axis=1) * _DOWN
