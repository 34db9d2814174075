"""Numbers in float8 e4m3 or int8, and the scale that they share: their largest magnitude over the
largest number, 448 or 127."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fp8_scale(largest: tl.tensor) -> tl.tensor:
    """Returns the scale of numbers up to `largest`; of zeros 1."""
    return tl.where(largest > 0, largest / 448.0, 1.0)


@triton.jit
def int8_scale(largest: tl.tensor) -> tl.tensor:
    """Returns the scale of numbers up to `largest`; of zeros 1."""
    return tl.where(largest > 0, largest / 127.0, 1.0)


@triton.jit
def to_int8(scaled: tl.tensor) -> tl.tensor:
    """Rounds numbers up to 127 to the nearest, of two the even one: no fraction is left of a number
    of float32 that is so large."""
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Returns `x` / `scale`, rounded. A quotient may come out above 448 by an error of rounding,
    which some conversions make NaN."""
    return tl.clamp(x / scale, -448.0, 448.0).to(tl.float8e4nv)
