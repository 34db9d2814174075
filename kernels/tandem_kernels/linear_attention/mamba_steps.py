"""Computes how far a token moves a state-space layer, and how much that layer forgets."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.elementwise.softplus import softplus


@triton.jit
def decay_and_step(
    steps: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, head: tl.tensor
) -> tl.tensor:
    """Returns (the logarithm of the decay, dt) of a head; `steps` points at rows of all heads."""
    raw = tl.load(steps + head).to(tl.float32) + tl.load(dt_bias + head)
    dt = softplus(raw)
    return -tl.exp(tl.load(a_log + head)) * dt, dt
