"""The form in which four-bit floats are kept: tiles that a program reads as they lie.

    weight [..., N, K] e2m1, MXFP4: an exponent (e8m0) for each 32 inputs
                             NVFP4: a scale (e4m3) for each 16 inputs, one factor for all
    tiles  [..., N / 64, K / 64, 544] int32     MXFP4: 512 words of numbers, then 32 of exponents
    tiles  [..., N / 64, K / 64, 576] int32     NVFP4: 512 words of numbers, then 64 of scales

A tile is 64 outputs x 64 inputs, all its bytes beside each other, so a program streams through
memory. The word of numbers at (side, warp, group, lane, half), these indices from the slowest to
the fastest, has eight inputs of output 16 * warp + 8 * side + group: with i = 32 * half + 2 * lane,
these are i, i + 1, i + 8, i + 9, i + 16, i + 17, i + 24 and i + 25. Thread (warp, group, lane) of a
multiplication by four warps needs just these, and no others.

A pair of numbers becomes two bf16 by a shift and a mask: their sign belongs into bit 15, exponent
and fraction into bits 8 to 6 of each half. Of eight numbers in 32 bits only three pairs can lie so
(their places would have to tile a half, and do not): 0, 4 and 10 bits below that, the last by a
rotation. The bits that are left in the words of both sides make one word together, the second one's
2 bits further, in which the fourth pairs lie so, 6 and 12 bits below, by a rotation.

An exponent's byte is that of the power of two, in bf16, that makes such a number its value: 126
more than in e8m0. So 128, a scale of 2, is the largest that can be kept, and weights are scaled by
far less.

The word of scales at (warp, group, half) has those of both sides and of both 16 inputs. A scale's
byte has the lower five bits of its exponent in bf16, and its fraction: it is kept 2 ** 119 times as
large, where the upper bits of all that e4m3 has are the same. So an NVFP4 number times its scale is
exact in half precision, 2 ** -7 of what it is, and a layer's factor is multiplied by 2 ** 7 for it.
The four bytes are rotated by 4 bits: those of the first side then lie in the two halves of the word
where bf16 has them, and those of the second do when it is rotated by 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 64
"""Outputs, and inputs, of a tile."""
GROUP = 32
"""Inputs that share an exponent."""
NUMBER_WORDS = 512
TILE_WORDS = 544
NVFP4_GROUP = 16
"""Inputs of NVFP4 that share a scale."""
NVFP4_TILE_WORDS = 576
NVFP4_ADDED = 224
"""A scale's exponent, in bf16, is this much more than what its byte has of it."""
NVFP4_FACTOR = 2.0**7
"""Sums of products by tiles of NVFP4 are multiplied by this, besides the weight's factor."""
SCALES_ROTATED = 4
"""A word of four scales' bytes is kept rotated to the left by this many bits."""
MAX_EXPONENT = 128
_ADDED_EXPONENT = 126
_SCALES_LIFTED = 2.0**119
SHIFTS = (0, 4, 10)
"""A word is rotated by this many bits until a pair, but the fourth, is in place."""
LAST_SHIFTS = (6, 12)
"""The word of both is rotated by this many until the fourth pair of a side is."""
LEFT = (0, 1, 9, 10)
"""Bits of each half that three pairs leave."""
MOVED = 2
"""Those of the second word are this many bits further in the word of both."""
PLACES = (15, 8, 7, 6)
"""Bits that sign, exponent and fraction must come to."""


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
    _tile_numbers(blocks.flatten(1), out)
    exponents = _padded(exponents + _ADDED_EXPONENT, num_rows, num_columns * SIDE // GROUP)
    powers = exponents.view(num_rows, 4, 2, 8, num_columns, 2).permute(0, 4, 1, 3, 5, 2)
    out[..., NUMBER_WORDS:] = powers.reshape(num_rows, num_columns, -1).view(torch.int32)


def tile_nvfp4(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes a weight [N, K] into `out` [ceil(N / 64), ceil(K / 64), 576] int32.

    Args:
        packed: [N, K / 2] uint8, two numbers in each, the first in the low half.
        scales: [N, K / 16] e4m3.

    Raises:
        ValueError: A scale is negative, or no number.
    """
    wide = scales.float()
    if not bool((wide >= 0).all()):
        raise ValueError("a scale is below 0, or no number")
    num_rows, num_columns = out.shape[:2]
    # A byte has no 0: numbers of a group without a scale are 0 instead.
    is_zero = (wide == 0).repeat_interleave(NVFP4_GROUP // 2, 1)
    _tile_numbers(packed.masked_fill(is_zero, 0), out)
    lifted = (wide * _SCALES_LIFTED).view(torch.int32)
    kept = ((lifted >> 20) - (NVFP4_ADDED << 3)).clamp(min=0).to(torch.uint8)
    kept = _padded(kept, num_rows, num_columns * SIDE // NVFP4_GROUP)
    of_words = kept.view(num_rows, 4, 2, 8, num_columns, 2, 2).permute(0, 4, 1, 3, 5, 6, 2)
    words = of_words.reshape(num_rows, num_columns, -1).view(torch.int32)
    out[..., NUMBER_WORDS:] = _rotated(words, SCALES_ROTATED)


def _rotated(words: Tensor, left: int) -> Tensor:
    """Returns int32 words rotated by 1 to 31 bits."""
    return words << left | (words >> 32 - left) & ((1 << left) - 1)


def _padded(numbers: Tensor, num_rows: int, width: int) -> Tensor:
    """Returns a matrix with zeros up to whole tiles."""
    missing = num_rows * SIDE - numbers.shape[0], width - numbers.shape[1]
    return F.pad(numbers, (0, missing[1], 0, missing[0]))


def _tile_numbers(packed: Tensor, out: Tensor) -> None:
    """Writes the words of numbers, from [N, K / 2] bytes of two."""
    num_rows, num_columns = out.shape[:2]
    packed = _padded(packed, num_rows, num_columns * SIDE // 2)
    # A word has four bytes of 32 inputs, of which each is a pair: byte 4 * pair + lane.
    first = 256 * torch.arange(4, dtype=torch.int32, device=packed.device)[:, None]
    side = torch.arange(len(packed), dtype=torch.int32, device=packed.device) // 8 % 2
    index = packed.view(len(packed), -1, 4, 4) + first + 1024 * side.view(-1, 1, 1, 1)
    own, other = _spread_bytes(packed.device)
    words = own.index_select(0, index.flatten()).view_as(index).sum(dim=2, dtype=torch.int32)
    last = index[:, :, 3]
    lent = other.index_select(0, last.flatten()).view(-1, 2, 8, *last.shape[1:])
    words += lent.flip(1).view_as(words)
    # Outputs (tile, warp, side, group), inputs (tile, half) and lanes.
    words = words.view(num_rows, 4, 2, 8, num_columns, 2, 4).permute(0, 4, 2, 1, 3, 6, 5)
    out[..., :NUMBER_WORDS] = words.reshape(num_rows, num_columns, NUMBER_WORDS)


@cache
def _spread_bytes(device: torch.device) -> Tensor:
    """Returns what each byte of a block adds to the word of its side, and to that of the other one,
    [2, 2 * 4 * 256]: of all bytes for each side and pair. Others get bits of fourth pairs alone."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    spread = torch.zeros((2, 2, 4, 256), dtype=torch.int32, device=device)
    for side, pair, number in product(range(2), range(4), range(2)):
        for bit, (word, place) in zip((3, 2, 1, 0), _places(side, pair, number), strict=True):
            spread[word ^ side, side, pair] |= (byte >> bit + 4 * number & 1) << place
    return spread.view(2, -1)


def _places(side: int, pair: int, number: int) -> list[tuple[int, int]]:
    """Returns where the four bits of a number are, the sign first: in which side's word, and at
    which bit of it."""
    shift = SHIFTS[pair] if pair < len(SHIFTS) else LAST_SHIFTS[side]
    places = [(place + 16 * number - shift) % 32 for place in PLACES]
    if pair < len(SHIFTS):
        return [(side, place) for place in places]
    return [(0, place) if place % 16 in LEFT else (1, place - MOVED) for place in places]


def _codes(words: Sequence[Tensor], side: int) -> Tensor:
    """Returns the eight numbers of each word of a side, in e2m1, from the words [...] of both."""
    codes = []
    for pair, number in product(range(4), range(2)):
        code = torch.zeros_like(words[side])
        for word, place in _places(side, pair, number):
            code = 2 * code + (words[word] >> place & 1)
        codes.append(code)
    return torch.stack(codes, dim=-1)


def tiles_of(
    num_outputs: int, num_inputs: int, tile_words: int = TILE_WORDS
) -> tuple[int, int, int]:
    """Returns the shape of a weight's tiles."""
    return -(-num_outputs // SIDE), -(-num_inputs // SIDE), tile_words


def untile_fp4(
    tiles: Tensor, num_outputs: int, num_inputs: int, factor: Tensor | None = None
) -> Tensor:
    """Returns a weight [N, K] in float32.

    Args:
        factor: Of NVFP4: what sums of products are multiplied by; of all outputs, or of each.
    """
    if tiles.shape[-1] == TILE_WORDS:
        return untile_mxfp4(tiles, num_outputs, num_inputs)
    assert factor is not None
    return untile_nvfp4(tiles, num_outputs, num_inputs) * (factor / NVFP4_FACTOR).view(-1, 1)


def untile_mxfp4(tiles: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Returns a weight [N, K] in float32."""
    values = _numbers_of(tiles)
    words = tiles[..., NUMBER_WORDS:].view(*tiles.shape[:2], 4, 8, 1, 1, 1, 1)
    shifts = 8 * torch.arange(4, dtype=torch.int32, device=tiles.device)
    powers = (words >> shifts.view(2, 2, 1)) & 255
    return _in_order(values * torch.exp2(powers.float() - _ADDED_EXPONENT - 127))[
        :num_outputs, :num_inputs
    ]


def untile_nvfp4(tiles: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Returns a weight [N, K] in float32, without its factor."""
    values = _numbers_of(tiles)
    words = _rotated(tiles[..., NUMBER_WORDS:], 32 - SCALES_ROTATED)
    words = words.view(*tiles.shape[:2], 4, 8, 1, 2, 1, 1, 1)
    # Bytes (16 inputs, side) become the dimensions of side, and of pairs by two.
    shifts = 8 * torch.arange(4, dtype=torch.int32, device=tiles.device).view(2, 2).t()
    kept = (words >> shifts[..., None]) & 255
    scales = (kept + (NVFP4_ADDED << 3) << 20).view(torch.float32) / _SCALES_LIFTED
    return _in_order(values.view(*values.shape[:-1], 2, 4).mul_(scales).flatten(-2))[
        :num_outputs, :num_inputs
    ]


def _numbers_of(tiles: Tensor) -> Tensor:
    """Returns the numbers of tiles in float32, as they lie: row, column, warp, group, lane, half,
    side, and in a word 2 * pair + number."""
    words = tiles[..., :NUMBER_WORDS].view(*tiles.shape[:2], 2, 4, 8, 4, 2).unbind(2)
    codes = torch.stack([_codes(words, side) for side in range(2)], dim=-2)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=tiles.device)
    return torch.cat((magnitudes, -magnitudes))[codes.long()]


def _in_order(values: Tensor) -> Tensor:
    """Returns what `_numbers_of` gave as [outputs, inputs]."""
    num_rows, num_columns = values.shape[:2]
    values = values.reshape(*values.shape[:-1], 4, 2).permute(0, 2, 6, 3, 1, 5, 7, 4, 8)
    return values.reshape(num_rows * SIDE, num_columns * SIDE)
