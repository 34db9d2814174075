"""The choice of a token's experts by each warp of a program for itself, as in `top_experts`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TAKEN = gl.constexpr(-(1 << 31))
"""Below the bits of all scores, and of what is no number."""


@gluon.jit
def top_expert(
    logits: gl.tensor,
    place: gl.tensor,
    scaling: gl.tensor,
    NUM_EXPERTS: gl.constexpr,
    LANES: gl.constexpr,
    TOP_K: gl.constexpr,
    RENORMALISE: gl.constexpr,
    PLACES: gl.constexpr,
    WARPS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Returns the expert that comes in `place` [PLACES] by a token's logits [NUM_EXPERTS], and its
    weight, as `route_tokens` chooses them. PLACES: one of each warp, or one for all."""
    CHOICE: gl.constexpr = gl.BlockedLayout([1, LANES // 32], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, PLACES, gl.SliceLayout(1, CHOICE))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, CHOICE))[None, :] + (warp * 0)[:, None]
    real = lane < NUM_EXPERTS
    # The second GEMM has waited for nothing yet, and reads past the SM's own cache, which may hold
    # what was there before.
    given = gl.load(logits + lane, mask=real, other=float("-inf"), cache_modifier=".cg")
    scores = gl.exp(given - gl.max(given, axis=1)[:, None])
    scores = scores / gl.sum(scores, axis=1)[:, None]
    bits = gl.where(real, scores.to(gl.int32, bitcast=True), _TAKEN)
    place = gl.convert_layout(place, gl.SliceLayout(1, CHOICE))
    expert = warp * 0
    weight = (warp * 0).to(gl.float32)
    total = weight
    for i in gl.static_range(TOP_K):
        best = gl.max(bits, axis=1)
        number = gl.min(gl.where(bits == best[:, None], lane, LANES), axis=1)
        share = best.to(gl.float32, bitcast=True)
        total += share
        expert = gl.where(place == i, number, expert)
        weight = gl.where(place == i, share, weight)
        bits = gl.where(lane == number[:, None], _TAKEN, bits)
    if RENORMALISE:
        weight = weight / (total + 1e-20)
    return expert, weight * scaling
