"""The choice of experts inside of the GEMM that computes them, for `fp4.pairs`.

Every program chooses for its token, which spares a launch between router and experts. Each warp of
it does so by itself: rows of all tensors below are the same, one for a warp, so that no reduction
waits for another warp. Scores of a softmax are positive, and then their bits are in the order of
their values. Integers are reduced by one instruction for all lanes of a warp, floats by ten.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TAKEN = tl.constexpr(-(1 << 31))
"""Below the bits of all scores, and of what is no number."""


@triton.jit
def _top_expert(
    logits: tl.tensor,
    place: tl.tensor,
    scaling: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Returns number `place` of the TOP_K experts that `route_tokens` chooses by a token's logits
    [NUM_EXPERTS], and its weight as each warp knows it, [WARPS]."""
    lane = (tl.arange(0, WARPS) * 0)[:, None] + tl.arange(0, LANES)[None, :]
    real = lane < NUM_EXPERTS
    given = tl.load(logits + lane, mask=real, other=float("-inf"))
    scores = tl.exp(given - tl.max(given, axis=1)[:, None])
    scores = scores / tl.sum(scores, axis=1)[:, None]
    bits = tl.where(real, scores.to(tl.int32, bitcast=True), _TAKEN)
    expert = tl.zeros([WARPS], tl.int32)
    weight = tl.zeros([WARPS], tl.float32)
    total = tl.zeros([WARPS], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(bits, axis=1)
        number = tl.min(tl.where(bits == best[:, None], lane, LANES), axis=1)
        share = best.to(tl.float32, bitcast=True)
        total += share
        expert = tl.where(place == i, number, expert)
        weight = tl.where(place == i, share, weight)
        bits = tl.where(lane == number[:, None], _TAKEN, bits)
    if RENORMALISE:
        weight = weight / (total + 1e-20)
    return tl.max(expert, axis=0), weight * scaling


@triton.jit
def expert_of_pair(
    logits: tl.tensor,
    slot_mapping: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    pair: tl.tensor,
    scaling: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Returns the expert of a pair. NUM_EXPERTS: it is chosen here, and the pair's first program
    writes it down, and its weight; 0: it is given."""
    if NUM_EXPERTS > 0:
        token = pair // TOP_K
        slot = tl.load(slot_mapping + token)
        own = logits + token.to(tl.int64) * NUM_EXPERTS
        expert, weight = _top_expert(
            own, pair % TOP_K, scaling, NUM_EXPERTS, LANES, TOP_K, RENORMALISE, WARPS
        )
        expert = tl.where(slot < 0, -1, expert)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(experts + pair, expert)
            tl.store(pair_weights + pair, tl.where(slot < 0, 0.0, tl.max(weight, axis=0)))
    else:
        expert = tl.load(experts + pair)
    return expert
