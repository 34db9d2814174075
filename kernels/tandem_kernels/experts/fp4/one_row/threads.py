"""Numbers threads, and activates, for kernels whose warps multiply by themselves."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def threads_of(WARPS: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Returns the number of each warp [WARPS], and of its threads [WARPS, 32]."""
    THREADS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, THREADS))
    return warp, gl.arange(0, 32, gl.SliceLayout(0, THREADS))[None, :] + (warp * 0)[:, None]


@gluon.jit
def activated(
    gate: gl.tensor, up: gl.tensor, limit: gl.tensor, alpha: gl.tensor, GATE: gl.constexpr
) -> gl.tensor:
    """Does what `expert_gate.activated` does, for the kinds of `shapes`."""
    if GATE == 1:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    if GATE == 5:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    found = gate / (1.0 + gl.exp(-gate))
    if GATE == 3:
        found = gl.minimum(found, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    return found * up
