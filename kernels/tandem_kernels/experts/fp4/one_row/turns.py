"""Turns of a warp through the inner dimension, for `one_row`: what it loads, and what it adds up.

    one turn: 3 tiles, [16, 192] weights of 6 groups, for gate and for up

A thread has the inputs of one group of a turn, and its group's column of the products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_kernels.experts.fp4.one_row.products import row_products

TURN_TILES = 3
"""Their groups fit in the eight columns of a product."""
_UP, _DOWN = gl.constexpr(0x6F806F80), gl.constexpr(2.0**-96)
"""The first is 2 ** 96 as two bf16; see `late`."""
_PRODUCTS, _REGISTERS = row_products(1)
_PAIR_PRODUCTS, _PAIR_REGISTERS = row_products(2)
_FOUR, _EIGHT = (gl.constexpr((gl.float32,) * count) for count in (4, 8))


@gluon.jit
def _tile_words(
    tiles: gl.tensor, column: gl.tensor, num_columns: gl.tensor, EVEN: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Loads a tile's words of both sides, two halves each."""
    words = (tiles + column * 544).to(gl.pointer_type(gl.int64), bitcast=True)
    if EVEN:
        first, second = gl.load(words), gl.load(words + 128)
    else:
        first = gl.load(words, mask=column < num_columns, other=0)
        second = gl.load(words + 128, mask=column < num_columns, other=0)
    return first, second


@gluon.jit
def _turn_words(
    tiles: gl.tensor,
    scales: gl.tensor,
    size: gl.tensor,
    turn: gl.tensor,
    quad: gl.tensor,
    num_columns: gl.tensor,
    GATED: gl.constexpr,
    EVEN: gl.constexpr,
) -> gl.tuple:
    """Loads the words of a turn: of its three tiles' numbers, and of the exponents of the tile
    whose columns this thread has. GATED: of gate and of up, which is `size` words further."""
    column = turn * 3
    own = column + quad
    real = (quad < 3) & (own < num_columns)
    exponents = gl.load(scales + own * 544, mask=real, other=0)
    a, b = _tile_words(tiles, column, num_columns, EVEN)
    c, d = _tile_words(tiles, column + 1, num_columns, EVEN)
    e, f = _tile_words(tiles, column + 2, num_columns, EVEN)
    found: gl.tuple = (exponents, exponents, (a, b), (c, d), (e, f))
    if GATED:
        exponents2 = gl.load(scales + size + own * 544, mask=real, other=0)
        tiles += size
        a2, b2 = _tile_words(tiles, column, num_columns, EVEN)
        c2, d2 = _tile_words(tiles, column + 1, num_columns, EVEN)
        e2, f2 = _tile_words(tiles, column + 2, num_columns, EVEN)
        found = (exponents, exponents2, (a, b, a2, b2), (c, d, c2, d2), (e, f, e2, f2))
    return found


@gluon.jit
def _turn_inputs(
    x: gl.tensor,
    turn: gl.tensor,
    group: gl.tensor,
    quad: gl.tensor,
    num_columns: gl.tensor,
) -> gl.tuple:
    """Loads the inputs of the group whose column this thread has, two in each word."""
    real = (group < 6) & (turn * 3 + group // 2 < num_columns)
    at = x + (turn * 96 + group * 16 + quad)
    return (
        gl.load(at, mask=real, other=0),
        gl.load(at + 4, mask=real, other=0),
        gl.load(at + 8, mask=real, other=0),
        gl.load(at + 12, mask=real, other=0),
    )


@gluon.jit
def _powers(word: gl.tensor) -> gl.tuple:
    """Returns the powers of two of a word: those of both halves, of the first side, then of the
    second."""
    return (
        ((word << 23) & 0x7F800000).to(gl.float32, bitcast=True),
        ((word << 7) & 0x7F800000).to(gl.float32, bitcast=True),
        ((word << 15) & 0x7F800000).to(gl.float32, bitcast=True),
        ((word >> 1) & 0x7F800000).to(gl.float32, bitcast=True),
    )


@gluon.jit
def _tile_products(
    words: gl.tuple,
    inputs: gl.tuple,
    column: gl.tensor,
    TILE: gl.constexpr,
    acc: gl.tuple,
    GATED: gl.constexpr,
) -> gl.tuple:
    """Adds a tile's products to the sums of its two columns."""
    nothing = column * 0
    even = gl.where(column == 2 * TILE, nothing + _UP, nothing)
    odd = gl.where(column == 2 * TILE + 1, nothing + _UP, nothing)
    x0, x1, x2, x3 = inputs
    if GATED:
        a, b, c, d = words
        s0, s1, s2, s3, t0, t1, t2, t3 = acc
        found = gl.inline_asm_elementwise(
            _PAIR_PRODUCTS, _PAIR_REGISTERS,
            [a, b, c, d, x0, x1, x2, x3, even, odd, s0, s1, s2, s3, t0, t1, t2, t3],
            _EIGHT, True, 1,
        )  # fmt: skip
    else:
        a, b = words
        s0, s1, s2, s3 = acc
        found = gl.inline_asm_elementwise(
            _PRODUCTS, _REGISTERS, [a, b, x0, x1, x2, x3, even, odd, s0, s1, s2, s3], _FOUR, True, 1
        )
    return found


@gluon.jit
def _turn_products(
    words: gl.tuple, inputs: gl.tuple, column: gl.tensor, sums: gl.tuple, GATED: gl.constexpr
) -> gl.tuple:
    """Adds a turn's products to the sums of outputs of both sides: of gates, and of ups."""
    exponents, exponents2, first, second, third = words
    zero = (column * 0).to(gl.float32)
    acc: gl.tuple = (zero, zero, zero, zero)
    if GATED:
        acc = (zero, zero, zero, zero, zero, zero, zero, zero)
    acc = _tile_products(first, inputs, column, 0, acc, GATED)
    acc = _tile_products(second, inputs, column, 1, acc, GATED)
    acc = _tile_products(third, inputs, column, 2, acc, GATED)
    low, high, low2, high2 = sums
    p0, p1, p2, p3 = _powers(exponents)
    low += acc[0] * p0 + acc[1] * p1
    high += acc[2] * p2 + acc[3] * p3
    if GATED:
        p0, p1, p2, p3 = _powers(exponents2)
        low2 += acc[4] * p0 + acc[5] * p1
        high2 += acc[6] * p2 + acc[7] * p3
    return low, high, low2, high2


@gluon.jit
def sum_of_warps(numbers: gl.tensor, WARPS: gl.constexpr) -> gl.tensor:
    """Sums [WARPS, 32, N], of which four threads have an output each -> [8, N]."""
    N: gl.constexpr = numbers.shape[2]
    return gl.sum(gl.sum(numbers.reshape(WARPS, 8, 4, N), axis=2), axis=0) * _DOWN


@gluon.jit
def asked(
    places: gl.tuple,
    turn: gl.tensor,
    quad: gl.tensor,
    num_columns: gl.tensor,
    STEP: gl.constexpr,
    AHEAD: gl.constexpr,
    GATED: gl.constexpr,
    EVEN: gl.constexpr,
) -> gl.tuple:
    """Loads the words of the first AHEAD turns of a warp, 1 or 2, which are STEP apart."""
    tiles, scales, size = places
    first = _turn_words(tiles, scales, size, turn, quad, num_columns, GATED, EVEN)
    second = first
    if AHEAD > 1:
        second = _turn_words(tiles, scales, size, turn + STEP, quad, num_columns, GATED, EVEN)
    return first, second


@gluon.jit
def walked(
    known: gl.tuple,
    places: gl.tuple,
    x: gl.tensor,
    turn: gl.tensor,
    threads: gl.tuple,
    num_columns: gl.tensor,
    sums: gl.tuple,
    STEP: gl.constexpr,
    TURNS: gl.constexpr,
    AHEAD: gl.constexpr,
    GATED: gl.constexpr,
    EVEN: gl.constexpr,
) -> gl.tuple:
    """Adds all turns of a warp to `sums`: those that are `known`, as `asked` gives them, and the
    others, AHEAD of their use. `x`: a row's words, two inputs each; GATED leaves no registers for
    those of the next turn."""
    group, quad = threads
    tiles, scales, size = places
    first, second = known
    inputs = _turn_inputs(x, turn, group, quad, num_columns)
    for i in gl.static_range(TURNS):
        given, words = inputs, first
        if not GATED and i + 1 < TURNS:
            inputs = _turn_inputs(x, turn + STEP, group, quad, num_columns)
        if AHEAD > 1:
            first = second
        if i + AHEAD < TURNS:
            behind = _turn_words(
                tiles, scales, size, turn + AHEAD * STEP, quad, num_columns, GATED, EVEN
            )
            if AHEAD > 1:
                second = behind
            else:
                first = behind
        sums = _turn_products(words, given, group, sums, GATED)
        turn += STEP
        if GATED and i + 1 < TURNS:
            inputs = _turn_inputs(x, turn, group, quad, num_columns)
    return sums


@gluon.jit
def columns_of(
    unit: gl.tensor, num_outputs: gl.tensor, WARPS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Returns which outputs [8, 2] of a program are, and whether they exist."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    col = gl.arange(0, 8, gl.SliceLayout(1, OUT))[:, None]
    col = unit * 16 + col + gl.arange(0, 2, gl.SliceLayout(0, OUT))[None, :] * 8
    return col, col < num_outputs


@gluon.jit
def in_columns(total: gl.tensor, WARPS: gl.constexpr) -> gl.tensor:
    """Lays outputs [8, 2] out as `columns_of` does."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    return gl.convert_layout(total, OUT)
