"""MXFP4 in plain torch: numbers of 4 bits in blocks of 32, which share an exponent.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023. A number is e2m1: a sign, two bits of
exponent, one of fraction. An exponent is e8m0: its byte minus 127; 255 is no number. Two numbers
lie in a byte, the first in the low half.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that share an exponent."""
BLOCK_BYTES = BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of packed blocks, exactly where `dtype` has their exponents.

    Args:
        blocks: [..., n, 16] uint8.
        scales: [..., n] uint8.

    Returns:
        [..., n * 32].
    """
    numbers = e2m1_numbers(blocks)
    return numbers.mul_(e8m0_powers(scales).unsqueeze(-1)).to(dtype).flatten(-2)


def e2m1_numbers(packed: Tensor) -> Tensor:
    """Returns both numbers of each byte, in float32: [..., n] uint8 -> [..., 2 * n]."""
    pairs, _ = _tables(packed.device)
    return pairs.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], -1)


def e8m0_powers(exponents: Tensor) -> Tensor:
    """Returns the power of two of each exponent, uint8, in float32."""
    _, powers = _tables(exponents.device)
    return powers.index_select(0, exponents.flatten().int()).view(exponents.shape)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns both numbers of each byte, [256, 2], and the power of two of each exponent, [256];
    float32."""
    magnitudes = torch.tensor(_MAGNITUDES)
    numbers = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte & 15], numbers[byte >> 4]), dim=-1)
    powers = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [float("nan")])
    return pairs.to(device), powers.to(device)
