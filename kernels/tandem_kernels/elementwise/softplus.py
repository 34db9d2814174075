"""The softplus that gates of states and routers share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Returns log(1 + exp(x)) of float32 numbers, with all digits where that is small.

    The sum of 1 and a small number keeps few of its digits, the same ones each time: states that
    forget little would be off by as much again with each token. The quotient of the two small
    numbers gives the digits back (Goldberg, "What every computer scientist should know about
    floating-point arithmetic", theorem 4).
    """
    power = tl.exp(-tl.abs(x))
    above = 1.0 + power
    small = tl.where(above == 1.0, power, tl.log(above) * (power / (above - 1.0)))
    return tl.maximum(x, 0.0) + small
