"""Multiplies a tile of rows by a strip of 4-bit weights: the inner loop of all kernels with such
weights.

Few rows are multiplied by a single warp's instructions, of which weights are the second operand;
where a strip has 64 outputs or more, they can be the first one instead, from registers, and on
Hopper four warps multiply together. Operands of the next blocks are on their way meanwhile; scales,
too, because a word of 32 bits is the least that can be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.int4_numbers import four_numbers, group_factors, weights_of


@triton.jit
def _loaded(places: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    return tl.load(places) if EVEN else tl.load(places, mask=mask, other=0)


@triton.jit
def _multiplied(
    given: tl.tensor, weights: tl.tensor, sums: tl.tensor, SWAPPED: tl.constexpr
) -> tl.tensor:
    if SWAPPED:
        sums = tl.dot(weights, tl.trans(given), sums)
    else:
        sums = tl.dot(given, tl.trans(weights), sums)
    return sums


@triton.jit
def multiplied_strip(
    inputs: tl.tensor,
    strip: tl.tensor,
    words: tl.tensor,
    up_strip: tl.tensor,
    up_words: tl.tensor,
    real_row: tl.tensor,
    real_col: tl.tensor,
    inner: tl.tensor,
    width: tl.tensor,
    first_block: tl.tensor,
    last_block: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Returns the products with a strip and, when GATED, with its up part: [ROWS, COLS] float32.

    Args:
        inputs: Pointers to the beginning of rows of x, [ROWS].
        strip, up_strip: To the beginning of packed outputs, [COLS].
        words, up_words: To the words of their first group, [COLS]; the next group's lie `width`
            behind.
        EVEN: The inner dimension has whole blocks, and all outputs are real.
    """
    QUARTER: tl.constexpr = BLOCK // 4
    kind: tl.constexpr = inputs.dtype.element_ty
    lane = tl.arange(0, QUARTER)
    shape: tl.constexpr = [COLS, ROWS] if SWAPPED else [ROWS, COLS]
    acc = tl.zeros(shape, tl.float32)
    second = tl.zeros(shape, tl.float32)
    inside = real_col[:, None]
    given_at = inputs[:, None] + lane[None, :]
    strip_at = strip[:, None] + lane[None, :]
    up_at = up_strip[:, None] + lane[None, :]
    for block in range(first_block, last_block):
        numbers = four_numbers(_loaded(strip_at + block * QUARTER, inside, EVEN), kind, IN_PAIRS)
        if GATED:
            ups = four_numbers(_loaded(up_at + block * QUARTER, inside, EVEN), kind, IN_PAIRS)
        for quarter in tl.static_range(4):
            start = block * BLOCK + quarter * QUARTER
            if (quarter * QUARTER) % GROUP == 0:
                group = (start // GROUP).to(tl.int64) * width
                word = _loaded(words + group, real_col, EVEN)
                scale, zero = group_factors(word, kind, IN_PAIRS)
                if GATED:
                    word = _loaded(up_words + group, real_col, EVEN)
                    up_scale, up_zero = group_factors(word, kind, IN_PAIRS)
            real = real_row[:, None]
            if not EVEN:
                real &= (start + lane < inner)[None, :]
            given = tl.load(given_at + start, mask=real, other=0.0)
            by = weights_of(numbers[quarter], scale[:, None], zero[:, None], kind, IN_PAIRS)
            acc = _multiplied(given, by, acc, SWAPPED)
            if GATED:
                by = weights_of(ups[quarter], up_scale[:, None], up_zero[:, None], kind, IN_PAIRS)
                second = _multiplied(given, by, second, SWAPPED)
    if SWAPPED:
        acc = tl.trans(acc)
        second = tl.trans(second)
    return acc, second
