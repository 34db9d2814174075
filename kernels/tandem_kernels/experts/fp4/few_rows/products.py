"""Instructions that multiply up to eight rows with a warp's part of two MXFP4 tiles.

    2 x 16 outputs, 64 inputs: two words of each side    times    8 columns, one of each row

A thread has four words of each matrix, which are its part of the first operand, and eight words of
a row, which are its part of the second. Nothing goes through shared memory.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from tandem_kernels.gemm.fp4_numbers import FIRST_BITS, pair_lines, pairs_of
from tandem_kernels.gemm.fp4_tiles import LAST_SHIFTS, MOVED

_SUMS = 4
"""A thread has two columns of two outputs for each matrix."""
_MATRICES = 2
_INPUTS = 8
_FACTORS = 0x00800080
"""A power's byte times this is the power as two bf16."""


def _half(first: str, second: str, powers: str, half: int, sums: list[str]) -> list[str]:
    """Returns instructions that multiply a word of each side by the four words of a half's inputs.
    `powers` has the bytes of both sides, of the first half and then of the second."""
    lines = [f"shl.b32 t, {second}, {MOVED};"]
    lines.append(f"lop3.b32 both, {first}, t, {FIRST_BITS:#x}, 0xE4;")
    for side, (to, word, last) in enumerate(zip("pq", (first, second), LAST_SHIFTS, strict=True)):
        lines.append(f"bfe.u32 t, {powers}, {16 * half + 8 * side}, 8;")
        lines.append(f"mul.lo.u32 factor, t, {_FACTORS:#x};")
        for pair, (given, shift) in enumerate(pairs_of(word, "both", last)):
            lines += pair_lines(given, shift, f"{to}{pair}")
            lines.append(f"fma.rn.bf16x2 {to}{pair}, {to}{pair}, factor, none;")
    for pair in (0, 2):
        left = f"{{p{pair}, q{pair}, p{pair + 1}, q{pair + 1}}}"
        right = f"{{b{4 * half + pair}, b{4 * half + pair + 1}}}"
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{{', '.join(sums)}}}, {left}, {right}, {{{', '.join(sums)}}};"
        )
    return lines


def _tile_products() -> tuple[gl.constexpr, gl.constexpr]:
    """Returns instructions and registers: of sums, [4] for each matrix; then two words of each
    side's halves for each, the powers of each, eight words of inputs, and sums again."""
    count = _SUMS * _MATRICES
    words = [f"${count + i}" for i in range(2 * _MATRICES)]
    place = count + len(words)
    powers = [f"${place + i}" for i in range(_MATRICES)]
    place += _MATRICES
    given = [f"${place + i}" for i in range(_INPUTS)]
    place += _INPUTS
    names = [f"{kind}{i}" for kind in "pq" for i in range(4)]
    names += [f"b{i}" for i in range(_INPUTS)]
    sums = [f"s{i}" for i in range(count)]
    lines = ["{ .reg .b32 none, t, both, factor, f0, f1, g0, g1, " + ", ".join(names) + ";"]
    lines.append(f".reg .f32 {', '.join(sums)}; mov.b32 none, 0x80008000;")
    lines += [f"mov.f32 {own}, ${place + i};" for i, own in enumerate(sums)]
    lines += [f"mov.b32 b{i}, {word};" for i, word in enumerate(given)]
    for matrix in range(_MATRICES):
        own = sums[_SUMS * matrix : _SUMS * (matrix + 1)]
        lines.append(f"mov.b64 {{f0, f1}}, {words[2 * matrix]};")
        lines.append(f"mov.b64 {{g0, g1}}, {words[2 * matrix + 1]};")
        lines += _half("f0", "g0", powers[matrix], 0, own)
        lines += _half("f1", "g1", powers[matrix], 1, own)
    lines += [f"mov.f32 ${i}, {own};" for i, own in enumerate(sums)]
    registers = ["=f"] * count + ["l"] * len(words) + ["r"] * (_MATRICES + _INPUTS) + ["f"] * count
    return gl.constexpr(" ".join([*lines, "}"])), gl.constexpr(",".join(registers))


TILE_PRODUCTS, TILE_REGISTERS = _tile_products()
EIGHT = gl.constexpr((gl.float32,) * (_SUMS * _MATRICES))
