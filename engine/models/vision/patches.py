"""Tells a vision tower where its patches are: learned positions, and how heads turn."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.images.vision_spec import PatchPositions, PatchRope
from engine.layers.rotary import inverse_frequencies

_CUBIC = -0.75
"""Keys' parameter, as torch's own bicubic interpolation has it."""


def stretched(table: Tensor, positions: PatchPositions, places: Tensor, grid: Tensor) -> Tensor:
    """Returns [patches, H] float32: a table of positions stretched over an image.

    Args:
        table: [side * side, H], by rows.
        places: [patches, 2] int64, row and column of each.
        grid: [2] int64, rows and columns of the image's patches.
    """
    if positions.resample in ("axes", "pairs"):
        parts = table.view(*positions.shape, -1)
        columns, rows = parts.unbind(0 if positions.resample == "axes" else 1)
        summed: Tensor = columns[places[:, 1]].float() + rows[places[:, 0]].float()
        return summed
    side = positions.side
    if positions.resample == "crossed":
        index = places[:, 0] * grid[1] + places[:, 1]
        places = torch.stack((index // grid[0], index % grid[0]), dim=1)
        grid = grid.flip(0)
    if positions.resample == "linear":
        at = places.float() * (side - 1) / (grid - 1).clamp(min=1)
    else:
        at = (places + 0.5) * side / grid - 0.5
    first, stop = (-1, 3) if positions.resample == "cubic" else (0, 2)
    taps = torch.arange(first, stop, device=places.device)
    near = at.floor()
    entries = near.long().unsqueeze(-1) + taps  # [patches, 2, taps]
    weights = _weights((at - near).unsqueeze(-1) - taps)
    if positions.resample == "crossed":
        weights = weights * ((entries >= 0) & (entries < side))
    entries = entries.clamp(0, side - 1)
    found = table.new_zeros((len(places), table.shape[1]), dtype=torch.float32)
    for row in range(len(taps)):
        for column in range(len(taps)):
            weight = (weights[:, 0, row] * weights[:, 1, column]).unsqueeze(1)
            found += table[entries[:, 0, row] * side + entries[:, 1, column]].float() * weight
    return found


def _weights(distance: Tensor) -> Tensor:
    """Returns what entries at a (signed) distance count: of the two nearest, or of four."""
    far = distance.abs()
    if distance.shape[-1] == 2:
        return 1 - far
    inner = ((_CUBIC + 2) * far - (_CUBIC + 3)) * far * far + 1
    outer = ((_CUBIC * far - 5 * _CUBIC) * far + 8 * _CUBIC) * far - 4 * _CUBIC
    return torch.where(far <= 1, inner, outer)


def turning(rope: PatchRope, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns of each pair of a head that turns, [head_dim / 2] at most: what it turns by, 0: the
    row, 1: the column, 2: the time, and its frequency, in radians for each of them."""
    if rope.pairs == "shared":
        frequencies = inverse_frequencies(head_dim, rope.theta)
        rows, columns = frequencies[0::2], frequencies[1::2]
    else:
        rows = columns = inverse_frequencies(head_dim // 2, rope.theta)
    if rope.pairs == "thirds":
        count = head_dim // 6
        turns = inverse_frequencies(2 * count, rope.theta)
        return torch.tensor([2, 0, 1]).repeat_interleave(count), turns.repeat(3)
    if rope.pairs == "apart":
        axes = torch.tensor([1, 0]).repeat_interleave(len(rows))
        return axes, torch.cat((columns, rows))
    if rope.pairs == "adjacent":
        axes = torch.tensor([1, 0]).repeat(len(rows))
        return axes, rows.repeat_interleave(2)
    order = [1, 0] if rope.pairs == "columns" else [0, 1]
    axes = torch.tensor(order).repeat_interleave(len(rows))
    return axes, torch.cat((rows, columns))
