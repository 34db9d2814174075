"""The activation between the two GEMMs of experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(
    gate: tl.tensor, up: tl.tensor, limit: tl.tensor, alpha: tl.tensor, CLAMPED: tl.constexpr
) -> tl.tensor:
    """Returns silu(gate) * up, or what `ClampedGate` says."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return gate / (1.0 + tl.exp(-gate)) * up
