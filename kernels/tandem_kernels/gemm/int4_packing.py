"""The packed form of 4-bit weights: what every published layout becomes when it is loaded.

    packed  [N, K' / 4] int16      four numbers in each
    groups  [K' / G, N, 2]         scale and zero point, beside each other in one 32-bit word

A weight is (number - zero) * scale; numbers and zeros are 0..15. Inputs come in blocks of 256 (128
where groups have 32), and place i of a block holds the numbers of inputs i, i + Q, i + 2 Q and
i + 3 Q, Q a quarter of a block, the first in the lowest bits. So two neighbouring places, which a
thread has in one register, give two neighbouring inputs with one shift and one mask, and all the
numbers of a quarter share a group. K' is K in whole blocks; what is added has the scale 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZES = (128, 64, 32)
"""Inputs that can share a scale here; a multiple of one of them is written as several groups."""


def block_size(group_size: int) -> int:
    """Returns how many inputs a block has."""
    return 128 if group_size == 32 else 256


def group_size_for(published: int, num_inputs: int) -> int | None:
    """Returns the largest size of groups here that cuts neither a published group nor the inputs
    of a rank; None: none does."""
    return next((size for size in GROUP_SIZES if published % size == num_inputs % size == 0), None)


def padded_inputs(num_inputs: int, group_size: int) -> int:
    """Returns K'."""
    return -(-num_inputs // block_size(group_size)) * block_size(group_size)


def packed_group_size(packed: Tensor, groups: Tensor) -> int:
    """Returns G of packed weights."""
    return packed.shape[1] * 4 // groups.shape[0]


def pack_numbers(numbers: Tensor, group_size: int) -> Tensor:
    """Packs [N, K] of 0..15, of any integer type -> [N, K' / 4] int16."""
    num_outputs, num_inputs = numbers.shape
    block = block_size(group_size)
    padded = F.pad(numbers, (0, -num_inputs % block)).view(num_outputs, -1, 4, block // 4)
    words = padded[:, :, 0].to(torch.int16)
    for quarter in (1, 2, 3):
        words |= padded[:, :, quarter].to(torch.int16) << 4 * quarter
    return words.flatten(1)


def pack_groups(scales: Tensor, zeros: Tensor, num_inputs: int, group_size: int) -> Tensor:
    """Packs [N, K / G] scales and zeros -> [K' / G, N, 2] of the scales' type."""
    both = torch.stack((scales, zeros.to(scales.dtype)), dim=-1).transpose(0, 1)
    missing = padded_inputs(num_inputs, group_size) // group_size - both.shape[0]
    return F.pad(both, (0, 0, 0, 0, 0, missing)).contiguous()


def unpack_numbers(packed: Tensor, group_size: int) -> Tensor:
    """Returns [N, K'] int32 of 0..15."""
    quarter = block_size(group_size) // 4
    words = packed.view(len(packed), -1, 1, quarter).to(torch.int32)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=packed.device)
    return (words >> shifts[:, None] & 15).flatten(1)
