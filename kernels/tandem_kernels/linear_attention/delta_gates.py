"""Computes what kernels of the gated delta rule need of queries, keys and gates."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.elementwise.softplus import softplus
from tandem_kernels.reference.delta_rule import L2_EPS as _L2_EPS

L2_EPS = tl.constexpr(_L2_EPS)


@triton.jit
def unit_length(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Returns float32 vectors along an axis, scaled to unit length."""
    return x / tl.sqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) + L2_EPS)


@triton.jit
def unit_scale(size: tl.tensor) -> tl.tensor:
    """Returns by what vectors are multiplied to have unit length; `size`: the sums of their
    squares."""
    return tl.div_rn(1.0, tl.sqrt_rn(size + L2_EPS))


@triton.jit
def log_decay(a: tl.tensor, a_log: tl.tensor, FLOOR: tl.constexpr) -> tl.tensor:
    """Returns g of a gate with its bias: negative, or 0, and not below `FLOOR` unless that is 0."""
    if FLOOR < 0.0:
        found = FLOOR / (1.0 + tl.exp(-tl.exp(a_log) * a))
    else:
        found = -tl.exp(a_log) * softplus(a)
    return found


@triton.jit
def rate_of(b: tl.tensor, rate_scale: tl.tensor) -> tl.tensor:
    """Returns beta of a gate."""
    return rate_scale / (1.0 + tl.exp(-b))


@triton.jit
def decay_and_rate(
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    rate_scale: tl.tensor,
    head: tl.tensor,
    NUM_VALUES: tl.constexpr,
) -> tl.tensor:
    """Returns (g, beta) of a value head; `gates` points at rows of b and a."""
    b = tl.load(gates + head).to(tl.float32)
    a = tl.load(gates + NUM_VALUES + head).to(tl.float32) + tl.load(dt_bias + head)
    return log_decay(a, tl.load(a_log + head), 0.0), rate_of(b, rate_scale)


@triton.jit
def channel_decays(
    decays: tl.tensor,
    stride: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    channel: tl.tensor,
    DIM: tl.constexpr,
    FLOOR: tl.constexpr,
) -> tl.tensor:
    """Returns g of a head's key channels, [tokens, channels]; 0 where `inside` denies the token.
    `decays` and `dt_bias` point at the head's first channel, `a_log` at the head."""
    real = inside[:, None] & (channel < DIM)[None, :]
    place = decays + token.to(tl.int64)[:, None] * stride + channel[None, :]
    bias = tl.load(dt_bias + channel, mask=channel < DIM, other=0.0)
    a = tl.load(place, mask=real, other=0.0).to(tl.float32) + bias[None, :]
    return tl.where(real, log_decay(a, tl.load(a_log), FLOOR), 0.0)
