"""The form in which experts' MXFP4 weights are kept: tiles that a program reads as they lie.

    weight [..., N, K] e2m1, an exponent (e8m0) for each 32 inputs
    tiles  [..., N / 64, K / 64, 544] int32     512 words of numbers, then 32 of exponents

A tile is 64 outputs x 64 inputs, all its bytes beside each other, so a program streams through
memory. The word of numbers at (warp, group, lane, half, side), these indices from the slowest to
the fastest, has eight inputs of output 16 * warp + 8 * side + group: with i = 32 * half + 2 * lane,
these are i, i + 1, i + 8, i + 9, i + 16, i + 17, i + 24 and i + 25. Thread (warp, group, lane) of a
multiplication by four warps needs just these, and no others.

Within a word, a pair of numbers becomes two bf16 by a shift and a mask: their sign belongs into bit
15, exponent and fraction into bits 8 to 6, and the three first pairs lie 0, 3 and 6 bits below
that. The fourth takes the bits that are left. An exponent's byte is that of the power of two, in
bf16, that makes such a number its value: 126 more than in e8m0. So 128, a scale of 2, is the
largest that can be kept, and weights are scaled by far less.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 64
"""Outputs, and inputs, of a tile."""
GROUP = 32
"""Inputs that share an exponent."""
NUMBER_WORDS = 512
TILE_WORDS = 544
MAX_EXPONENT = 128
_ADDED_EXPONENT = 126
_SHIFTS = (0, 3, 6)
_PLACES = (15, 8, 7, 6)
"""Bits that sign, exponent and fraction must come to."""
_LAST_PLACES = (14, 13, 11, 10)
"""Bits where those of the fourth pair lie."""


def tile_mxfp4(blocks: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Writes a weight [N, K] into `out` [ceil(N / 64), ceil(K / 64), 544] int32.

    Args:
        blocks: [N, K / 32, 16] uint8, two numbers in each, the first in the low half.
        exponents: [N, K / 32] uint8.

    Raises:
        ValueError: An exponent is above 128.
    """
    if int(exponents.max()) > MAX_EXPONENT:
        raise ValueError(f"an exponent is {int(exponents.max())}, above {MAX_EXPONENT}")
    num_rows, num_columns = out.shape[:2]
    missing = num_rows * SIDE - blocks.shape[0], num_columns * SIDE // GROUP - blocks.shape[1]
    exponents = F.pad(exponents + _ADDED_EXPONENT, (0, missing[1], 0, missing[0]))
    blocks = F.pad(blocks, (0, 0, 0, missing[1], 0, missing[0]))
    # A word has four bytes of a block, of which each is a pair: byte 4 * pair + lane.
    first = 256 * torch.arange(4, dtype=torch.int32, device=blocks.device)
    index = blocks.view(*blocks.shape[:2], 4, 4).to(torch.int32) + first[:, None]
    spread = _spread_bytes(blocks.device).index_select(0, index.flatten()).view_as(index)
    words = spread.sum(dim=2, dtype=torch.int32)
    # Outputs (tile, warp, side, group), inputs (tile, half) and lanes.
    words = words.view(num_rows, 4, 2, 8, num_columns, 2, 4).permute(0, 4, 1, 3, 6, 5, 2)
    out[..., :NUMBER_WORDS] = words.reshape(num_rows, num_columns, NUMBER_WORDS)
    powers = exponents.view(num_rows, 4, 2, 8, num_columns, 2).permute(0, 4, 1, 3, 5, 2)
    out[..., NUMBER_WORDS:] = powers.reshape(num_rows, num_columns, -1).view(torch.int32)


@cache
def _spread_bytes(device: torch.device) -> Tensor:
    """Returns what each byte of a block adds to its word, [4 * 256]: of all bytes for each pair."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    pairs = []
    for pair in range(4):
        spread = torch.zeros_like(byte)
        for bit, place in zip((3, 2, 1, 0), _places(pair), strict=True):
            spread |= (byte >> bit & 1) << place | (byte >> bit + 4 & 1) << place + 16
        pairs.append(spread)
    return torch.cat(pairs)


def _places(pair: int) -> tuple[int, ...]:
    """Returns where a word has the four bits of a pair's first number, the sign first."""
    if pair < len(_SHIFTS):
        return tuple(place - _SHIFTS[pair] for place in _PLACES)
    return _LAST_PLACES


def tiles_of(num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
    """Returns the shape of a weight's tiles."""
    return -(-num_outputs // SIDE), -(-num_inputs // SIDE), TILE_WORDS


def untile_mxfp4(tiles: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Returns a weight [N, K] in float32."""
    num_rows, num_columns, _ = tiles.shape
    words = tiles[..., :NUMBER_WORDS].view(num_rows, num_columns, 4, 8, 4, 2, 2)
    codes = []
    for pair in range(4):
        for number in range(2):
            low = words >> 16 * number
            bits = [low >> place & 1 for place in _places(pair)]
            codes.append(8 * bits[0] + 4 * bits[1] + 2 * bits[2] + bits[3])
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=tiles.device)
    values = torch.cat((magnitudes, -magnitudes))[torch.stack(codes, dim=-1).long()]
    scale_words = tiles[..., NUMBER_WORDS:].view(num_rows, num_columns, 4, 8, 1, 1, 1, 1)
    shifts = 8 * torch.arange(4, dtype=torch.int32, device=tiles.device)
    powers = (scale_words >> shifts.view(2, 2, 1)) & 255
    values = values * torch.exp2(powers.float() - _ADDED_EXPONENT - 127)
    # (row, column, warp, group, lane, half, side, pair * 2 + number) back to outputs and inputs.
    values = values.view(*words.shape, 4, 2).permute(0, 2, 6, 3, 1, 5, 7, 4, 8)
    return values.reshape(num_rows * SIDE, num_columns * SIDE)[:num_outputs, :num_inputs]
