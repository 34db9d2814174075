"""The activation between the two GEMMs of experts, of kernels in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def activated(gate: gl.tensor, up: gl.tensor, limit: gl.tensor, GATE: gl.constexpr) -> gl.tensor:
    """Does what `expert_gate.activated` does, where `gate_form.is_silu`."""
    if GATE == 5:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    found = gate / (1.0 + gl.exp(-gate))
    if GATE == 3:
        found = gl.minimum(found, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    return found * up


@gluon.jit
def activated_by_alpha(
    gate: gl.tensor, up: gl.tensor, limit: gl.tensor, alpha: gl.tensor, GATE: gl.constexpr
) -> gl.tensor:
    """Does the same, and that of gpt-oss, which has an `alpha`."""
    if GATE == 1:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    return activated(gate, up, limit, GATE)
