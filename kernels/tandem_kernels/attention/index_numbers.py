"""Scores as whole numbers of the same order, and how high the highest of some are."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)
"""Are the bounds of scores as whole numbers: all are at least the one, and below the other."""
STRIDE = tl.constexpr(8)
"""Counts scores side by side in a sample: what memory gives at once."""


@triton.jit
def ordered(scores: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Loads scores as int32 numbers of the same order, the lowest where not `mask`; both zeros are
    one, and what is no number is below `HIGHEST`, too."""
    bits = tl.load(scores, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    number = tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), HIGHEST - 1)
    return tl.where(mask, number, LOWEST)


@triton.jit
def floor_of(
    numbers: tl.tensor, low: tl.tensor, high: tl.tensor, fewest: tl.tensor, most: tl.tensor
) -> tl.tensor:
    """Returns a number that at least `fewest` of `numbers` reach, and no more than `most`: if there
    is none, the highest that `fewest` do.

    Args:
        low, high: int64. At least `fewest` reach the one, and fewer the other.
    """
    while high - low > 1:
        third = (high - low + 2) // 3
        first, second = low + third, tl.minimum(low + 2 * third, high)
        # Both counts are added up at once: neither has more than 16 bits.
        reached = (numbers >= first.to(tl.int32)).to(tl.int32)
        reached += (numbers >= second.to(tl.int32)).to(tl.int32) << 16
        counts = tl.sum(reached, axis=0)
        many, few = counts & 0xFFFF, counts >> 16
        count = tl.where(few >= fewest, few, many)
        low = tl.where(few >= fewest, second, tl.where(many >= fewest, first, low))
        high = tl.where(few >= fewest, high, tl.where(many >= fewest, second, first))
        high = tl.where((count >= fewest) & (count <= most), low + 1, high)
    return low


@triton.jit
def floor_by(
    sample: tl.tensor, length: tl.tensor, TOP_K: tl.constexpr, CANDIDATES: tl.constexpr
) -> tl.tensor:
    """Returns a number that more than TOP_K of a row's `length` scores reach, by a sample of
    CANDIDATES: one and a half times as many where twice as many fit, three times where eight times
    do."""
    spare: tl.constexpr = (CANDIDATES / TOP_K / 2) ** 0.5
    share = spare * TOP_K * CANDIDATES / length
    high = tl.max(sample, axis=0).to(tl.int64) + 1
    fewest = tl.maximum((1.4 * share).to(tl.int32), 1)
    low = high * 0 + LOWEST
    return floor_of(sample, low, high, fewest, (1.6 * share).to(tl.int32))
