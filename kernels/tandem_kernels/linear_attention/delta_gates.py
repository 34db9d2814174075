"""Computes what kernels of the gated delta rule need of queries, keys and gates."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.reference.delta_rule import L2_EPS as _L2_EPS

L2_EPS = tl.constexpr(_L2_EPS)


@triton.jit
def unit_length(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Returns float32 vectors along an axis, scaled to unit length."""
    return x / tl.sqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) + L2_EPS)


@triton.jit
def decay_and_rate(
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    head: tl.tensor,
    NUM_VALUES: tl.constexpr,
) -> tl.tensor:
    """Returns (g, beta) of a value head; `gates` points at rows of b and a."""
    b = tl.load(gates + head).to(tl.float32)
    a = tl.load(gates + NUM_VALUES + head).to(tl.float32) + tl.load(dt_bias + head)
    # The softplus of a large number is that number.
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return -tl.exp(tl.load(a_log + head)) * soft, 1.0 / (1.0 + tl.exp(-b))
