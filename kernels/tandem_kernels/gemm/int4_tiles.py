"""Multiplies a tile of rows by a strip of 4-bit weights: the inner loop of all kernels with such
weights.

SWAPPED, weights are the first operand, from registers: the side of rows may then be as narrow as 8,
and with four warps and 64 outputs or more Hopper's multiply together. The next blocks are on their
way meanwhile, scales, too, because a word of 32 bits is the least that can be. What a strip of few
rows takes time for is neither memory nor matrix units but unpacking, so each instruction counts:
scales multiply the sums of a group then (LATE), of which there are fewer than weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.gemm.int4_numbers import (
    four_numbers,
    group_factors,
    group_scale,
    less_zero,
    weights_of,
)


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
def _operand(
    numbers: tl.tensor,
    word: tl.tensor,
    kind: tl.constexpr,
    LATE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Returns the weights of a quarter, [COLS, K]; LATE: without their scales."""
    scale, zero = group_factors(word, kind, IN_PAIRS)
    if LATE:
        by = less_zero(numbers, zero[:, None], kind, IN_PAIRS)
    else:
        by = weights_of(numbers, scale[:, None], zero[:, None], kind, IN_PAIRS)
    return by


@triton.jit
def _scales(word: tl.tensor, kind: tl.constexpr, SWAPPED: tl.constexpr) -> tl.tensor:
    """Returns the scales of a group, to multiply sums by."""
    scale = group_scale(word, kind)
    return scale[:, None] if SWAPPED else scale[None, :]


@triton.jit
def multiplied_strip(
    inputs: tl.tensor,
    strip: tl.tensor,
    words: tl.tensor,
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
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    LATE: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Returns the products with a strip, [ROWS, COLS] float32.

    Args:
        inputs: Pointers to the beginning of rows of x, [ROWS].
        strip: To the beginning of packed outputs, [COLS].
        words: To the words of their first group, [COLS]; the next group's lie `width` behind.
        EVEN: The inner dimension has whole blocks, and all outputs are real.
        LATE: Scales multiply the sums of a group in place of its weights: less work where rows are
            few.
        LANES: Places of a block in one turn of the loop, each of four inputs: all, or where rows
            are many fewer, so that more turns fit in memory.
    """
    QUARTER: tl.constexpr = BLOCK // 4
    PIECES: tl.constexpr = QUARTER // LANES
    kind: tl.constexpr = inputs.dtype.element_ty
    lane = tl.arange(0, LANES)
    shape: tl.constexpr = [COLS, ROWS] if SWAPPED else [ROWS, COLS]
    acc = tl.zeros(shape, tl.float32)
    part = acc
    inside = real_col[:, None]
    given_at = inputs[:, None] + lane[None, :]
    strip_at = strip[:, None] + lane[None, :]
    for step in range(first_block * PIECES, last_block * PIECES):
        numbers = four_numbers(_loaded(strip_at + step * LANES, inside, EVEN), kind, IN_PAIRS)
        for quarter in tl.static_range(4):
            start = step // PIECES * BLOCK + quarter * QUARTER + step % PIECES * LANES
            if (quarter * QUARTER) % GROUP == 0:
                group = (start // GROUP).to(tl.int64) * width
                word = _loaded(words + group, real_col, EVEN)
                if LATE:
                    part = tl.zeros(shape, tl.float32)
            real = real_row[:, None]
            if not EVEN:
                real &= (start + lane < inner)[None, :]
            given = tl.load(given_at + start, mask=real, other=0.0)
            by = _operand(numbers[quarter], word, kind, LATE, IN_PAIRS)
            if LATE:
                part = _multiplied(given, by, part, SWAPPED)
                if (quarter + 1) * QUARTER % GROUP == 0:
                    acc += part * _scales(word, kind, SWAPPED)
            else:
                acc = _multiplied(given, by, acc, SWAPPED)
    if SWAPPED:
        acc = tl.trans(acc)
    return acc


@triton.jit
def strip_columns(
    tile: tl.tensor, num_outputs: tl.tensor, COLS: tl.constexpr, GATED: tl.constexpr
) -> tl.tensor:
    """Returns the outputs of a strip's columns, [COLS], and whether they are real. GATED: the first
    half are gates, the other one their ups, which lie `num_outputs` behind."""
    lane = tl.arange(0, COLS)
    if GATED:
        gate = tile * (COLS // 2) + lane % (COLS // 2)
        col = gate + lane // (COLS // 2) * num_outputs
        real = gate < num_outputs
    else:
        col = tile * COLS + lane
        real = col < num_outputs
    return col, real


@triton.jit
def gate_and_up(acc: tl.tensor, ROWS: tl.constexpr, COLS: tl.constexpr) -> tl.tensor:
    """Takes the columns of a gated strip apart: gates and ups, [ROWS, COLS / 2] each."""
    return tl.split(acc.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))
