"""The instructions that multiply rows with weights in registers, run one by one without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem_kernels.gemm.fp4_tiles import untile_mxfp4

pytest.importorskip("triton")

from tandem_kernels.experts.fp4.few_rows.products import TILE_PRODUCTS
from tandem_kernels.experts.fp4.one_row.products import row_products
from tandem_kernels.gemm.few_row_warps import BLOCK_PRODUCTS

LANE = torch.arange(32)
GROUP, QUAD = LANE // 4, LANE % 4
WORD = (1 << 32) - 1
UP = 0x6F806F80
"""The number is 2 ** 96 as two bf16."""


def _halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both bf16 of words, in float32."""
    low, high = (words & 0xFFFF) << 16, words & 0xFFFF0000
    return _float(low), _float(high)


def _float(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _word(low: Tensor, high: Tensor) -> Tensor:
    """Rounds two numbers to the bf16 of a word."""
    bits = [half.bfloat16().view(torch.int16).long() & 0xFFFF for half in (low, high)]
    return bits[0] | bits[1] << 16


class Warp:
    """Runs instructions on 32 lanes: words are int64 below 2 ** 32, sums float32."""

    def __init__(self, operands: Sequence[Tensor], first: int) -> None:
        self.registers = {f"${first + i}": value for i, value in enumerate(operands)}

    def run(self, code: str) -> None:
        for line in code.strip()[1:-1].split(";"):
            if line.strip() and not line.strip().startswith(".reg"):
                operation, rest = line.strip().split(" ", 1)
                self._step(operation, re.findall(r"\{[^}]*\}|[^,\s]+", rest))

    def _value(self, name: str) -> Tensor:
        known = self.registers.get(name)
        return torch.full((32,), int(name, 0)) if known is None else known

    def _step(self, operation: str, names: list[str]) -> None:
        target, given = names[0], names[1:]
        if operation.startswith("mma"):
            self._multiply(*(name[1:-1].split(", ") for name in names))
        elif operation == "mov.b64":
            low, high = target[1:-1].split(", ")
            self.registers[low] = self._value(given[0]) & WORD
            self.registers[high] = self._value(given[0]) >> 32 & WORD
        elif operation in ("mov.b32", "mov.f32"):
            self.registers[target] = self._value(given[0])
        elif operation == "bfe.u32":
            first, count = (int(name) for name in given[1:])
            self.registers[target] = self._value(given[0]) >> first & (1 << count) - 1
        elif operation == "mul.lo.u32":
            self.registers[target] = self._value(given[0]) * self._value(given[1]) & WORD
        elif operation == "shl.b32":
            self.registers[target] = self._value(given[0]) << int(given[1]) & WORD
        elif operation == "shf.l.wrap.b32":
            word, by = self._value(given[0]), int(given[2])
            self.registers[target] = (word << by | word >> 32 - by) & WORD
        elif operation == "and.b32":
            self.registers[target] = self._value(given[0]) & self._value(given[1])
        elif operation == "lop3.b32":
            one, other, mask = (self._value(name) for name in given[:3])
            assert given[3] == "0xE4", "bits of the first where the mask has them, else the second"
            self.registers[target] = one & mask | other & ~mask & WORD
        else:
            assert operation == "fma.rn.bf16x2"
            pairs = zip(_halves(self._value(given[0])), _halves(self._value(given[1])), strict=True)
            low, high = (number * factor for number, factor in pairs)
            self.registers[target] = _word(low, high)

    def _multiply(self, out: list[str], left: list[str], right: list[str], sums: list[str]) -> None:
        a, b = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
        for i, name in enumerate(left):
            place = GROUP + 8 * (i % 2), 2 * QUAD + 8 * (i // 2)
            a[place], a[place[0], place[1] + 1] = (x.double() for x in _halves(self._value(name)))
        for i, name in enumerate(right):
            place = 2 * QUAD + 8 * i, GROUP
            b[place], b[place[0] + 1, place[1]] = (x.double() for x in _halves(self._value(name)))
        found = a @ b
        for i, (to, old) in enumerate(zip(out, sums, strict=True)):
            own = found[GROUP + 8 * (i // 2), 2 * QUAD + i % 2]
            self.registers[to] = (own + self.registers[old]).float()


@pytest.mark.parametrize("count", [1, 2])
def test_products_of_a_row_with_part_of_a_tile(count: int) -> None:
    """Each group's sum is in a column of its own, without its power of two, which is 2 ** 126 of
    what it is, of a row that is multiplied by 2 ** 96."""
    tiles = torch.randint(-(2**31), 2**31, (count, 1, 1, 544)).to(torch.int32)
    tiles[..., 512:] = -0x02020203  # Bytes of 0xfd: powers of 1.
    x = torch.randn(64).bfloat16()
    words = tiles[:, 0, 0].long() & WORD
    inputs = x.view(torch.int32).long() & WORD
    given = [inputs[16 * (GROUP % 2) + QUAD + 4 * i] for i in range(4)]
    factors = [torch.where(side == GROUP, UP, 0) for side in range(2)]
    code, _ = row_products(count)
    for quarter in range(4):
        at = 64 * quarter + 2 * LANE
        pairs = [own[at + s] | own[at + s + 1] << 32 for own in words for s in (0, 256)]
        warp = Warp([*pairs, *given, *factors, *[torch.zeros(32)] * (4 * count)], 4 * count)
        warp.run(code.value)
        for i in range(count):
            wide = untile_mxfp4(tiles[i], 64, 64).double()
            expected = (wide * x.double()).view(64, 2, 32).sum(dim=2)
            for side, half in ((0, 0), (0, 1), (1, 0), (1, 1)):
                found = warp.registers[f"${4 * i + 2 * side + half}"][QUAD == 0]
                own = expected[16 * quarter + 8 * side :][:8, half]
                torch.testing.assert_close(found.double() * 2.0**30, own, rtol=1e-5, atol=1e-5)


def test_products_of_eight_rows_with_part_of_two_tiles() -> None:
    """Each row's sums of both parts, with their powers, are added to its column."""
    tiles = torch.randint(-(2**31), 2**31, (2, 1, 1, 544)).to(torch.int32)
    powers = torch.randint(248, 255, (2, 1, 1, 128)).to(torch.uint8)
    tiles[..., 512:] = powers.view(torch.int32)
    x = torch.randn(8, 64).bfloat16()
    words = tiles[:, 0, 0].long() & WORD
    inputs = x.view(torch.int32).long() & WORD
    given = [inputs[GROUP, QUAD + 4 * i] for i in range(8)]
    before = [torch.randn(32) for _ in range(8)]
    for quarter in range(4):
        at = 64 * quarter + 2 * LANE
        pairs = [own[at + s] | own[at + s + 1] << 32 for own in words for s in (0, 256)]
        scales = [own[512 + 8 * quarter + GROUP] for own in words]
        warp = Warp([*pairs, *scales, *given, *before], 8)
        warp.run(TILE_PRODUCTS.value)
        for part in range(2):
            expected = untile_mxfp4(tiles[part], 64, 64).double() @ x.double().T
            for i in range(4):
                place = 16 * quarter + GROUP + 8 * (i // 2), 2 * QUAD + i % 2
                own = expected[place] + before[4 * part + i].double()
                found = warp.registers[f"${4 * part + i}"].double()
                torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-4)


def test_products_of_eight_rows_with_what_lies_beside_each_other() -> None:
    """A thread has a vector of two outputs and one of a row, of the same eight inputs."""
    weight, x = torch.randn(16, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    lines = [rows.view(torch.int64) for rows in (weight[:8], weight[8:], x)]
    vectors = [line[GROUP, 2 * QUAD + i] for line in lines for i in range(2)]
    before = [torch.randn(32) for _ in range(4)]
    warp = Warp([*vectors, *before], 4)
    warp.run(BLOCK_PRODUCTS.value)
    expected = weight.double() @ x.double().T
    for i in range(4):
        own = expected[GROUP + 8 * (i // 2), 2 * QUAD + i % 2] + before[i].double()
        torch.testing.assert_close(warp.registers[f"${i}"].double(), own, rtol=1e-5, atol=1e-5)
