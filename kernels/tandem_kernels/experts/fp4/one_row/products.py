"""Instructions that multiply a row with a warp's part of an MXFP4 tile, without its powers of two.

    16 outputs, 64 inputs: two words of each side    times    8 columns, one of each group

A thread has four words and the inputs of one column. They are multiplied by 2 ** 96 where a group
is the column's own, else by zero; so each group's sum comes into its own column; see `late`.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from tandem_kernels.gemm.fp4_numbers import FIRST_BITS, pair_lines, pairs_of
from tandem_kernels.gemm.fp4_tiles import LAST_SHIFTS, MOVED

_SUMS = 4
"""A thread has two columns of two outputs for each matrix."""


def _half(first: str, second: str, inputs: int, sums: list[str]) -> list[str]:
    """Returns instructions that multiply a word of each side by inputs {inputs} to {inputs} + 3."""
    lines = [f"shl.b32 t, {second}, {MOVED};"]
    lines.append(f"lop3.b32 both, {first}, t, {FIRST_BITS:#x}, 0xE4;")
    for to, word, last in zip("pq", (first, second), LAST_SHIFTS, strict=True):
        for pair, (given, shift) in enumerate(pairs_of(word, "both", last)):
            lines += pair_lines(given, shift, f"{to}{pair}")
    for pair in (0, 2):
        left = f"{{p{pair}, q{pair}, p{pair + 1}, q{pair + 1}}}"
        right = f"{{b{inputs + pair}, b{inputs + pair + 1}}}"
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{{', '.join(sums)}}}, {left}, {right}, {{{', '.join(sums)}}};"
        )
    return lines


def row_products(num_matrices: int) -> tuple[gl.constexpr, gl.constexpr]:
    """Returns instructions and registers: of sums, [4] for each matrix; then two words of each
    side's halves for each, four words of inputs, the factors of both groups, and sums again."""
    count = _SUMS * num_matrices
    words = [f"${count + i}" for i in range(2 * num_matrices)]
    given = [f"${count + 2 * num_matrices + i}" for i in range(4)]
    factors = [f"${count + 2 * num_matrices + 4 + i}" for i in range(2)]
    before = [f"${count + 2 * num_matrices + 6 + i}" for i in range(count)]
    names = [f"{kind}{i}" for kind in "pq" for i in range(4)] + [f"b{i}" for i in range(8)]
    sums = [f"s{i}" for i in range(count)]
    lines = ["{ .reg .b32 none, t, both, f0, f1, g0, g1, " + ", ".join(names) + ";"]
    lines.append(f".reg .f32 {', '.join(sums)}; mov.b32 none, 0x80008000;")
    lines += [f"mov.f32 {own}, {old};" for own, old in zip(sums, before, strict=True)]
    for half, factor in enumerate(factors):
        lines += [
            f"fma.rn.bf16x2 b{4 * half + i}, {word}, {factor}, none;"
            for i, word in enumerate(given)
        ]
    for matrix in range(num_matrices):
        own = sums[_SUMS * matrix : _SUMS * (matrix + 1)]
        lines.append(f"mov.b64 {{f0, f1}}, {words[2 * matrix]};")
        lines.append(f"mov.b64 {{g0, g1}}, {words[2 * matrix + 1]};")
        lines += _half("f0", "g0", 0, own) + _half("f1", "g1", 4, own)
    lines += [f"mov.f32 ${i}, {own};" for i, own in enumerate(sums)]
    registers = ["=f"] * count + ["l"] * (2 * num_matrices) + ["r"] * 6 + ["f"] * count
    return gl.constexpr(" ".join([*lines, "}"])), gl.constexpr(",".join(registers))
