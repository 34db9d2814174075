"""Pairs of a step whose experts a rank has: few of all, and which ones is known when it runs.

Programs find them among PAIRS places, no fewer than the step has pairs:

    for own in range(.., count):  pair_at(own)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_pairs(
    experts: tl.tensor, num_pairs: tl.tensor, PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the experts of all pairs, [PAIRS], -1 where a rank has none; which of a rank's own
    pairs each is, [PAIRS]; and how many these are."""
    lane = tl.arange(0, PAIRS)
    # Not by way of the SM's own cache, which may hold what was there before: a kernel that is in
    # place early has waited for nothing yet.
    chosen = tl.load(experts + lane, mask=lane < num_pairs, other=-1, cache_modifier=".cg")
    has_own = (chosen >= 0).to(tl.int32)
    return chosen, tl.cumsum(has_own, axis=0) - has_own, tl.sum(has_own, axis=0)


@triton.jit
def pair_at(
    chosen: tl.tensor, place: tl.tensor, own: tl.tensor, PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the rank's own pair number `own`, and its expert."""
    is_it = (chosen >= 0) & (place == own)
    pair = tl.sum(tl.where(is_it, tl.arange(0, PAIRS), 0), axis=0)
    return pair, tl.sum(tl.where(is_it, chosen, 0), axis=0)
