"""Makes half precision of 4-bit numbers in registers: what kernels with such weights share.

A 32-bit register holds two neighbouring places of a block (`int4_packing`), of four numbers each.
A shift and a mask leave two numbers, and set into the mantissas of two powers of two they are
halves (Kim et al., Who Says Elephants Can't Run, 2022). Then one instruction takes off power and
zero point, which is exact, and one multiplies by the scale, which rounds once.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SET = "lop3.b32 {to}, {of}, 0x000f000f, {power}, 0xea;"


def _four_numbers(power: str) -> tl.constexpr:
    """Returns the instructions that make four registers of numbers of one."""
    lines = ["{ .reg .b32 t;", _SET.format(to="$0", of="$4", power=power)]
    for quarter in (1, 2, 3):
        lines.append(f"shr.u32 t, $4, {4 * quarter};")
        lines.append(_SET.format(to=f"${quarter}", of="t", power=power))
    return tl.constexpr(" ".join([*lines, "}"]))


def _less_zero(kind: str, one: str) -> tl.constexpr:
    """Returns the instructions for number - zero."""
    return tl.constexpr(
        f"{{ .reg .b32 one; mov.b32 one, {one}; fma.rn.{kind}x2 $0, $1, one, $2; }}"
    )


def _factored(kind: str, one: str) -> tl.constexpr:
    """Returns the instructions for number - zero, times the scale."""
    return tl.constexpr(
        f"{{ .reg .b32 t, one, none; mov.b32 one, {one}; mov.b32 none, 0x80008000;"
        f" fma.rn.{kind}x2 t, $1, one, $4; fma.rn.{kind}x2 $0, t, $2, none; }}"
    )


_BF16_NUMBERS = _four_numbers("0x43004300")
_FP16_NUMBERS = _four_numbers("0x64006400")
_BF16_LESS_ZERO = _less_zero("bf16", "0x3f803f80")
_FP16_LESS_ZERO = _less_zero("f16", "0x3c003c00")
_BF16_FACTORED = _factored("bf16", "0x3f803f80")
_FP16_FACTORED = _factored("f16", "0x3c003c00")

_NUMBERS_REGISTERS = tl.constexpr("=r,=r,=r,=r,r")
_LESS_ZERO_REGISTERS = tl.constexpr("=r,r,r,r")
_FACTORED_REGISTERS = tl.constexpr("=r,r,r,r,r,r")


@triton.jit
def four_numbers(places: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr) -> tl.tensor:
    """Unpacks int16 places of a block -> the numbers of its four quarters, in `kind`; IN_PAIRS they
    lie above a power of two."""
    if not IN_PAIRS:
        bits = places.to(tl.int32)
        numbers = (
            (bits & 15).to(kind),
            ((bits >> 4) & 15).to(kind),
            ((bits >> 8) & 15).to(kind),
            ((bits >> 12) & 15).to(kind),
        )
    elif kind == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            _BF16_NUMBERS,
            _NUMBERS_REGISTERS,
            [places],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True,
            2,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            _FP16_NUMBERS,
            _NUMBERS_REGISTERS,
            [places],
            (tl.float16, tl.float16, tl.float16, tl.float16),
            True,
            2,
        )
    return numbers


@triton.jit
def group_factors(word: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr) -> tl.tensor:
    """Unpacks the words of groups -> scales and zeros; IN_PAIRS in both halves of int32, the zeros
    with the power and negative."""
    zero = (word >> 16).to(tl.int16).to(kind, bitcast=True)
    if IN_PAIRS:
        power = 1024.0 if kind == tl.float16 else 128.0
        taken = (-power - zero.to(tl.float32)).to(kind).to(tl.int16, bitcast=True).to(tl.int32)
        factors = _in_both_halves(word), _in_both_halves(taken)
    else:
        factors = word.to(tl.int16).to(kind, bitcast=True), zero
    return factors


@triton.jit
def _in_both_halves(bits: tl.tensor) -> tl.tensor:
    low = bits & 0xFFFF
    return low | (low << 16)


@triton.jit
def weights_of(
    numbers: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    kind: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Returns (number - zero) * scale, of what `four_numbers` and `group_factors` gave. The factors
    are broadcast."""
    if not IN_PAIRS:
        factored = (numbers.to(tl.float32) - zero.to(tl.float32)) * scale.to(tl.float32)
        weights = factored.to(kind)
    elif kind == tl.bfloat16:
        weights = tl.inline_asm_elementwise(
            _BF16_FACTORED, _FACTORED_REGISTERS, [numbers, scale, zero], tl.bfloat16, True, 2
        )
    else:
        weights = tl.inline_asm_elementwise(
            _FP16_FACTORED, _FACTORED_REGISTERS, [numbers, scale, zero], tl.float16, True, 2
        )
    return weights


@triton.jit
def less_zero(
    numbers: tl.tensor, zero: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr
) -> tl.tensor:
    """Returns number - zero, which is exact; see `weights_of`."""
    if not IN_PAIRS:
        difference = (numbers.to(tl.float32) - zero.to(tl.float32)).to(kind)
    elif kind == tl.bfloat16:
        difference = tl.inline_asm_elementwise(
            _BF16_LESS_ZERO, _LESS_ZERO_REGISTERS, [numbers, zero], tl.bfloat16, True, 2
        )
    else:
        difference = tl.inline_asm_elementwise(
            _FP16_LESS_ZERO, _LESS_ZERO_REGISTERS, [numbers, zero], tl.float16, True, 2
        )
    return difference


@triton.jit
def group_scale(word: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Unpacks the words of groups -> scales in float32."""
    return word.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
