"""The softplus that gates of states and routers share."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Returns log(1 + exp(x)) of float32 numbers, with all digits where that is small.

    The sum of 1 and a small number keeps few of its digits, the same ones each time: states that
    forget little would be off by as much again with each token. log(1 + p) is 2 artanh(s) of
    s = p / (2 + p), which is at most 1/3: seven terms of its series have all digits.
    """
    power = tl.exp2(tl.abs(x) * -_LOG2E)
    s = power / (2.0 + power)
    square = s * s
    series = 2.0 / 11 + square * (2.0 / 13)
    series = 2.0 / 7 + square * (2.0 / 9 + square * series)
    series = 2.0 / 3 + square * (2.0 / 5 + square * series)
    return tl.maximum(x, 0.0) + (2.0 * s + s * (square * series))
