"""The activation between the two GEMMs of experts."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.soft_cap import soft_capped


@triton.jit
def activated(
    gate: tl.tensor, up: tl.tensor, limit: tl.tensor, alpha: tl.tensor, GATE: tl.constexpr
) -> tl.tensor:
    """Returns silu(gate) * up, or what `GateForm` says; GATE is a `gate_code`."""
    if GATE == 4:
        gate = tl.maximum(gate, 0.0)
        return gate * gate
    if GATE == 1:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    if GATE == 5:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    steep = gate
    if GATE == 2:
        # GELU's tanh formula is SiLU of another argument; see `silu_and_mul`.
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    factor = gate
    if GATE == 6:
        factor = soft_capped(gate, alpha)
        up = soft_capped(up, limit)
    found = factor / (1.0 + tl.exp(-steep))
    if GATE == 3:
        found = tl.minimum(found, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return found * up
