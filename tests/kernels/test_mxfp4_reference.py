"""MXFP4 against the format's definition, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch

from tandem_kernels.reference.mxfp4 import dequantise_mxfp4


def number(bits: int) -> float:
    """Reads e2m1: a sign, two bits of exponent with bias 1, one of fraction."""
    exponent, fraction = bits >> 1 & 3, bits & 1
    size = math.ldexp(1 + fraction / 2, exponent - 1) if exponent else fraction / 2
    return math.copysign(size, -1 if bits & 8 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_at_every_exponent(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(4, -1, -1)
    scales = torch.tensor([1, 100, 127, 250], dtype=torch.uint8)[:, None].expand(-1, 16)
    found = dequantise_mxfp4(blocks, scales, dtype)
    assert found.shape == (4, 512) and found.dtype == dtype
    for row, exponent in zip(found.double().tolist(), (1, 100, 127, 250), strict=True):
        expected = [
            math.ldexp(number(half), exponent - 127)
            for byte in range(256)
            for half in (byte & 15, byte >> 4)
        ]
        assert [math.copysign(1, x) for x in row] == [math.copysign(1, x) for x in expected]
        assert row == expected


def test_blocks_have_exponents_of_their_own() -> None:
    blocks = torch.full((2, 3, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[127, 128, 126], [255, 0, 127]], dtype=torch.uint8)
    found = dequantise_mxfp4(blocks, scales, torch.float32).view(2, 3, 32)
    assert found[0].tolist() == [[1.0] * 32, [2.0] * 32, [0.5] * 32]
    assert found[1, 0].isnan().all() and found[1, 2].tolist() == [1.0] * 32
    assert float(found[1, 1, 0]) == 2.0**-127
