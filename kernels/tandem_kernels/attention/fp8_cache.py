"""Numbers of an FP8 cache (e4m3) in registers.

An attention kernel that multiplies in 16 bits wants the numbers of two neighbouring tokens in one
register, and has only bytes of one token side by side. So rows are loaded as pairs of bytes, which
move between memory and registers like any 16-bit numbers, and each pair is taken apart into a
number of an even and one of an odd column:

    row of the cache     | c0 c1 | c2 c3 | ...       pairs, [tokens, D / 2]
    `unpacked`           | c0 | c2 | ... and | c1 | c3 | ...    float16, exactly

Scores are the sum of two products, and even and odd columns of the result have an accumulator each.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpacked(pairs: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Returns the numbers in the low and in the high bytes of int16 `pairs`, as two float16 tiles.

    NATIVE: By the instruction of Ada and Hopper; else by arithmetic. Both are exact.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 sorted;
                .reg .b16 low, high;
                prmt.b32 sorted, $2, $2, 0x3120;
                mov.b32 {low, high}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = _from_bits(pairs), _from_bits(pairs >> 8)
    return low, high


@triton.jit
def _from_bits(x: tl.tensor) -> tl.tensor:
    """Takes the low byte of `x`. The exponent of float16 is higher by 8 for the same bits."""
    wide = x.to(tl.int32)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def in_half(q: tl.tensor) -> tl.tensor:
    """Returns queries as they are multiplied with numbers of an FP8 cache: bfloat16 becomes
    float16, which has more bits for what is not beyond 65504."""
    if q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def e4m3_bits(x: tl.tensor) -> tl.tensor:
    """Rounds float32 to the nearest e4m3 number, ties to even, too large ones to the largest.

    By arithmetic on bits, because that gives the same everywhere: conversions saturate in some
    places and not in others. Returns uint8.
    """
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 bits of mantissa go, and the bias of the exponent becomes 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers lie 2^-9 apart, as float32 does from 2^14 on.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
