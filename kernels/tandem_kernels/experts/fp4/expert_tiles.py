"""Splits each expert's rows into tiles of about the same height, once for both GEMMs of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.fp4.ahead_shapes import HEIGHT

PLACES = 128
"""Places of rows in a tile, a power of two."""


@triton.jit(do_not_specialize=["num_pairs"])
def expert_tiles_kernel(
    order: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    HEIGHT: tl.constexpr,
    PLACES: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Writes tile p in program p, as `ExpertTiles` has it."""
    tile = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    count = tl.load(counts + lane, mask=lane < num_experts, other=0)
    of_expert = tl.cdiv(count, HEIGHT)
    ends = tl.cumsum(of_expert, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    own = lane == expert
    parts = tl.maximum(tl.sum(tl.where(own, of_expert, 0), axis=0), 1)
    part = tile - tl.sum(tl.where(own, ends - of_expert, 0), axis=0)
    total = tl.sum(tl.where(own, count, 0), axis=0)
    first = total * part // parts
    height = tl.where(expert < num_experts, total * (part + 1) // parts - first, 0)
    start = tl.sum(tl.where(lane < expert, count, 0), axis=0) + first
    place = tl.arange(0, PLACES)
    pair = tl.load(order + start + place, mask=place < height, other=num_pairs)
    tl.store(pairs + tile * PLACES + place, pair)
    tl.store(tiles + 2 * tile + 2, tl.minimum(expert, num_experts - 1))
    tl.store(tiles + 2 * tile + 3, height)
    if tile == 0:
        tl.store(tiles, tl.sum(of_expert, axis=0))


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Holds the tiles of rows of a step's experts.

    Attributes:
        pairs: [most, PLACES] int32: the (token, expert) pairs of each tile that may be; the number
            of all pairs for none.
        tiles: [2 + 2 * most] int32: how many tiles there are, nothing, and of each its expert and
            how many pairs it has. Behind the last they have none.
    """

    pairs: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, rows: ExpertRows) -> ExpertTiles:
        """Splits sorted rows."""
        assert rows.order is not None
        assert rows.counts is not None
        num_pairs, num_experts = rows.experts.numel(), rows.num_experts
        # The kernel counts what it is given: there is room even where a token names one twice.
        most = triton.cdiv(num_pairs, HEIGHT) + num_experts
        pairs = rows.order.new_empty((most, PLACES))
        tiles = rows.order.new_empty(2 + 2 * most)
        expert_tiles_kernel[(most,)](
            rows.order,
            rows.counts,
            pairs,
            tiles,
            num_pairs,
            num_experts,
            HEIGHT=HEIGHT,
            PLACES=PLACES,
            EXPERTS=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
        return cls(pairs, tiles)
