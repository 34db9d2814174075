"""The soft bound of attention scores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def soft_capped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Returns `cap * tanh(scores / cap)`, with the bound in units of unscaled scores."""
    return cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
