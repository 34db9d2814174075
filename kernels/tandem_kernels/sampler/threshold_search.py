"""The largest logit v at which a row's tokens at or above v number, or weigh, enough.

Tokens are weighed against eight pivots between a logit that reaches the target and the largest;
what lies between the two pivots around the answer is copied out, the same is done to the copy,
and what is left is quartered until one logit remains.

A copy is a list for each lane of the program, so lanes never wait for one another: entry i of a
lane is at `i * BLOCK + lane`, and `counts` [BLOCK] says how many there are. A row of the
vocabulary has the same shape, filled to its end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def one_round(
    tokens: tl.tensor,
    i: tl.tensor,
    vocab_size: tl.tensor,
    counts: tl.tensor,
    IN_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns entry i of every lane, -inf where there is none."""
    place = i * BLOCK + tl.arange(0, BLOCK)
    mask = place < vocab_size if IN_ROW else i < counts
    return tl.load(tokens + place, mask=mask, other=float("-inf"))


@triton.jit
def _weight(
    x: tl.tensor, peak: tl.tensor, inverse_t: tl.tensor, chosen: tl.tensor, BY_MASS: tl.constexpr
) -> tl.tensor:
    """Returns the weight of tokens in the search: their probability times a constant, or
    one each.
    """
    if BY_MASS:
        return tl.where(chosen, tl.exp((x - peak) * inverse_t), 0.0)
    return tl.where(chosen, 1.0, 0.0)


@triton.jit
def _pivot(lo: tl.tensor, hi: tl.tensor, eighths: tl.tensor) -> tl.tensor:
    """Returns the point `eighths` of the way from lo to hi; one rounding, so every caller gets the
    same number.
    """
    return tl.minimum(tl.maximum(tl.fma(hi - lo, eighths * 0.125, lo), lo), hi)


@triton.jit
def weigh(
    tokens: tl.tensor,
    rounds: tl.tensor,
    vocab_size: tl.tensor,
    counts: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    peak: tl.tensor,
    inverse_t: tl.tensor,
    BY_MASS: tl.constexpr,
    IN_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns the weight of tokens at or above each eighth of [lo, hi]: [16], entries 0 to 8."""
    w0 = tl.zeros([BLOCK], tl.float32)
    w1 = tl.zeros([BLOCK], tl.float32)
    w2 = tl.zeros([BLOCK], tl.float32)
    w3 = tl.zeros([BLOCK], tl.float32)
    w4 = tl.zeros([BLOCK], tl.float32)
    w5 = tl.zeros([BLOCK], tl.float32)
    w6 = tl.zeros([BLOCK], tl.float32)
    w7 = tl.zeros([BLOCK], tl.float32)
    w8 = tl.zeros([BLOCK], tl.float32)
    for i in range(rounds):
        x = one_round(tokens, i, vocab_size, counts, IN_ROW, BLOCK)
        weight = _weight(x, peak, inverse_t, x >= lo, BY_MASS)
        w0 += weight
        w1 += tl.where(x >= _pivot(lo, hi, 1.0), weight, 0.0)
        w2 += tl.where(x >= _pivot(lo, hi, 2.0), weight, 0.0)
        w3 += tl.where(x >= _pivot(lo, hi, 3.0), weight, 0.0)
        w4 += tl.where(x >= _pivot(lo, hi, 4.0), weight, 0.0)
        w5 += tl.where(x >= _pivot(lo, hi, 5.0), weight, 0.0)
        w6 += tl.where(x >= _pivot(lo, hi, 6.0), weight, 0.0)
        w7 += tl.where(x >= _pivot(lo, hi, 7.0), weight, 0.0)
        w8 += tl.where(x >= hi, weight, 0.0)
    eighth = tl.arange(0, 16)
    sums = tl.where(eighth == 0, tl.sum(w0), 0.0)
    sums += tl.where(eighth == 1, tl.sum(w1), 0.0) + tl.where(eighth == 2, tl.sum(w2), 0.0)
    sums += tl.where(eighth == 3, tl.sum(w3), 0.0) + tl.where(eighth == 4, tl.sum(w4), 0.0)
    sums += tl.where(eighth == 5, tl.sum(w5), 0.0) + tl.where(eighth == 6, tl.sum(w6), 0.0)
    sums += tl.where(eighth == 7, tl.sum(w7), 0.0) + tl.where(eighth == 8, tl.sum(w8), 0.0)
    return sums


@triton.jit
def eighth_of(
    sums: tl.tensor, beyond: tl.tensor, target: tl.tensor, lo: tl.tensor, hi: tl.tensor
) -> tl.tensor:
    """Returns the eighth [start, end) of [lo, hi] with the answer; start = end = hi if it is hi."""
    eighth = tl.arange(0, 16)
    reached = (beyond + sums >= target) & (eighth >= 1) & (eighth <= 8)
    last = tl.max(tl.where(reached, eighth, 0), axis=0).to(tl.float32)
    start = tl.where(last == 8.0, hi, _pivot(lo, hi, last))
    return start, tl.where(last >= 7.0, hi, _pivot(lo, hi, last + 1.0))


@triton.jit
def _copy_between(
    tokens: tl.tensor,
    rounds: tl.tensor,
    vocab_size: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    peak: tl.tensor,
    inverse_t: tl.tensor,
    copy: tl.tensor,
    BY_MASS: tl.constexpr,
    IN_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copy logits in [start, end) to lists at `copy`.

    Returns the lists' counts and rounds, the smallest and the largest logit copied, what they
    weigh, and what the tokens at or above `end` weigh.
    """
    lane = tl.arange(0, BLOCK)
    copied = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    inside = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, rounds, num_stages=3):
        x = one_round(tokens, i, vocab_size, counts, IN_ROW, BLOCK)
        chosen = (x >= start) & (x < end)
        tl.store(copy + copied * BLOCK + lane, x, mask=chosen)
        copied += chosen.to(tl.int32)
        least = tl.minimum(least, tl.where(chosen, x, float("inf")))
        most = tl.maximum(most, tl.where(chosen, x, float("-inf")))
        weight = _weight(x, peak, inverse_t, x >= start, BY_MASS)
        inside += tl.where(chosen, weight, 0.0)
        above += tl.where(chosen, 0.0, weight)
    tl.debug_barrier()
    weights = tl.sum(inside), tl.sum(above)
    return copied, tl.max(copied), tl.min(least), tl.max(most), weights[0], weights[1]


@triton.jit
def _narrow(
    tokens: tl.tensor,
    rounds: tl.tensor,
    counts: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    beyond: tl.tensor,
    target: tl.tensor,
    peak: tl.tensor,
    inverse_t: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns the answer in [lo, hi], both logits of `tokens`.

    Each pass quarters the range and pulls both ends in to the nearest logits, so it ends when
    they meet, after at most one pass a distinct logit.
    """
    while lo < hi:
        p1 = tl.minimum(tl.maximum(lo * 0.75 + hi * 0.25, lo), hi)
        p2 = tl.minimum(tl.maximum(lo * 0.5 + hi * 0.5, lo), hi)
        p3 = tl.minimum(tl.maximum(lo * 0.25 + hi * 0.75, lo), hi)
        w1 = tl.zeros([BLOCK], tl.float32)
        w2 = tl.zeros([BLOCK], tl.float32)
        w3 = tl.zeros([BLOCK], tl.float32)
        w4 = tl.zeros([BLOCK], tl.float32)
        least1 = tl.full([BLOCK], float("inf"), tl.float32)
        least2 = tl.full([BLOCK], float("inf"), tl.float32)
        least3 = tl.full([BLOCK], float("inf"), tl.float32)
        most1 = tl.full([BLOCK], float("-inf"), tl.float32)
        most2 = tl.full([BLOCK], float("-inf"), tl.float32)
        most3 = tl.full([BLOCK], float("-inf"), tl.float32)
        most4 = tl.full([BLOCK], float("-inf"), tl.float32)
        for i in range(rounds):
            x = one_round(tokens, i, 0, counts, False, BLOCK)
            weight = _weight(x, peak, inverse_t, x >= lo, BY_MASS)
            w1 += tl.where(x >= p1, weight, 0.0)
            w2 += tl.where(x >= p2, weight, 0.0)
            w3 += tl.where(x >= p3, weight, 0.0)
            w4 += tl.where(x >= hi, weight, 0.0)
            least1 = tl.minimum(least1, tl.where(x >= p1, x, float("inf")))
            least2 = tl.minimum(least2, tl.where(x >= p2, x, float("inf")))
            least3 = tl.minimum(least3, tl.where(x >= p3, x, float("inf")))
            most1 = tl.maximum(most1, tl.where(x < p1, x, float("-inf")))
            most2 = tl.maximum(most2, tl.where(x < p2, x, float("-inf")))
            most3 = tl.maximum(most3, tl.where(x < p3, x, float("-inf")))
            most4 = tl.maximum(most4, tl.where(x < hi, x, float("-inf")))
        if beyond + tl.sum(w4) >= target:
            lo = hi
        elif beyond + tl.sum(w3) >= target:
            lo = tl.min(least3)
            hi = tl.max(most4)
        elif beyond + tl.sum(w2) >= target:
            lo = tl.min(least2)
            hi = tl.max(most3)
        elif beyond + tl.sum(w1) >= target:
            lo = tl.min(least1)
            hi = tl.max(most2)
        else:
            hi = tl.max(most1)
        hi = tl.maximum(lo, hi)
    return lo


@triton.jit
def search_between(
    row: tl.tensor,
    vocab_size: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    target: tl.tensor,
    share: tl.tensor,
    peak: tl.tensor,
    inverse_t: tl.tensor,
    copies: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns the answer in [start, end) of a row; `target` 0: `share` of what these tokens
    weigh.
    """
    rounds = tl.cdiv(vocab_size, BLOCK)
    none = tl.zeros([BLOCK], tl.int32)
    counts, few, lo, hi, inside, beyond = _copy_between(
        row, rounds, vocab_size, none, start, end, peak, inverse_t, copies, BY_MASS, True, BLOCK
    )
    target = tl.where(target == 0.0, share * inside, target)
    sums = weigh(copies, few, vocab_size, counts, lo, hi, peak, inverse_t, BY_MASS, False, BLOCK)
    start, end = eighth_of(sums, beyond, target, lo, hi)
    if start < end:
        second = copies + rounds * BLOCK
        counts, few, lo, hi, _, above = _copy_between(
            copies, few, vocab_size, counts, start, end, peak, inverse_t, second,
            BY_MASS, False, BLOCK,
        )  # fmt: skip
        start = _narrow(
            second, few, counts, lo, hi, beyond + above, target, peak, inverse_t, BY_MASS, BLOCK
        )
    return start
