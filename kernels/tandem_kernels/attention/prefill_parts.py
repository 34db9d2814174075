"""Parts of a context, each walked by a program of its own, and joined by the last one to arrive.

    1. `own_walk`  which positions of a tile's context a program walks
    2. `joined`    it leaves the state of its softmax, and counts itself as arrived; the last of a
                   tile takes all of them, in the order of positions

So the result does not depend on who arrived last. Short contexts have one part, which nothing
keeps: how many there are is found on the device, and a recorded step fits any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import num_programs

LEAST_WALK = 512
"""Positions of a part at least: what fewer save, joining costs."""
_LEAST_WALK = tl.constexpr(LEAST_WALK)
_MOST_PARTS = 16
_PROGRAMS_PER_SM = 2
_MOST_TILES = 1 << 14


def num_parts(num_busy: int, num_tiles: int, longest: int, device: torch.device) -> int:
    """Returns into how many parts contexts are cut, at most: so many that programs fill the device.

    Args:
        num_busy: Programs that have something to do, one for each tile of query rows.
        num_tiles: All of them, spare ones included.
        longest: Tokens of the longest context.
    """
    if num_tiles > _MOST_TILES:
        return 1
    wanted = num_programs(device, _PROGRAMS_PER_SM) // max(num_busy, 1)
    return max(1, min(wanted, longest // LEAST_WALK, _MOST_PARTS))


@dataclass(frozen=True, slots=True)
class PartsKept:
    """Holds parts until they are joined; None: contexts are never cut.

    Attributes:
        num_parts: Of a context, at most.
        acc: [tile, part, row, D] float32, sums.
        state: [tile, part, 2, row] float32, peaks and totals.
        arrived: [tile] int32, parts that are there.
    """

    num_parts: int = 1
    acc: Tensor | None = None
    state: Tensor | None = None
    arrived: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns them in the kernel's order."""
        return self.acc, self.state, self.arrived

    @classmethod
    def of(
        cls, num_tiles: int, parts: int, rows: int, block_dim: int, device: torch.device
    ) -> PartsKept:
        """Takes no memory if there is one part."""
        num_tiles = num_tiles if parts > 1 else 0
        acc = torch.empty((num_tiles, parts, rows, block_dim), dtype=torch.float32, device=device)
        state = torch.empty((num_tiles, parts, 2, rows), dtype=torch.float32, device=device)
        return cls(parts, acc, state, _arrival_counts(device))


@cache
def _arrival_counts(device: torch.device) -> Tensor:
    """Returns a counter for each tile, zero between kernels. Kernels on one stream share them."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


@triton.jit
def own_walk(
    part: tl.tensor, end: tl.tensor, most_parts: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Returns the first position of a part, the one behind its last, and the number of parts of a
    context of `end` positions."""
    tiles = tl.cdiv(end, TILE)
    run = tl.maximum(tl.cdiv(tiles, most_parts), _LEAST_WALK // TILE)
    begin = part * run * TILE
    return begin, tl.minimum(begin + run * TILE, end), tl.maximum(tl.cdiv(tiles, run), 1)


@triton.jit
def _keep(
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    slot: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Stores the state of a softmax, peak and total [ROWS] and sums [ROWS, BLOCK_DIM]."""
    row = tl.arange(0, ROWS)
    state = partial_state + slot.to(tl.int64) * (2 * ROWS) + row
    tl.store(state, peak)
    tl.store(state + ROWS, total)
    place = slot.to(tl.int64) * ROWS + row
    tl.store(partial_acc + place[:, None] * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :], acc)


@triton.jit
def _taken(
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    first_slot: tl.tensor,
    parts: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Returns what `parts` kept from a slot on, as one softmax. Reads past the first cache: other
    programs wrote it."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for part in range(parts):
        slot = (first_slot + part).to(tl.int64)
        state = partial_state + slot * (2 * ROWS) + row
        own_peak = tl.load(state, cache_modifier=".cg")
        own_total = tl.load(state + ROWS, cache_modifier=".cg")
        place = (slot * ROWS + row)[:, None] * BLOCK_DIM + dim[None, :]
        own_acc = tl.load(partial_acc + place, cache_modifier=".cg")
        higher = tl.maximum(peak, own_peak)
        shrink = tl.exp2(peak - higher)
        own_share = tl.exp2(own_peak - higher)
        total = total * shrink + own_total * own_share
        acc = acc * shrink[:, None] + own_acc * own_share[:, None]
        peak = higher
    return peak, total, acc


@triton.jit
def joined(
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    arrived: tl.tensor,
    tile: tl.tensor,
    parts: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Returns whether this program is the last of its tile's `parts`, and if it is the state of the
    softmax over all of them."""
    is_last = parts == 1
    if parts > 1:
        first_slot = tile * tl.num_programs(2)
        slot = first_slot + tl.program_id(2)
        _keep(partial_acc, partial_state, slot, peak, total, acc, ROWS, BLOCK_DIM)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile, 1) == parts - 1
        if is_last:
            tl.store(arrived + tile, 0)
            peak, total, acc = _taken(
                partial_acc, partial_state, first_slot, parts, ROWS, BLOCK_DIM
            )
    return is_last, peak, total, acc
