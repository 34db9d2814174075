"""The rows of each expert, which are (token, expert) pairs numbered token * k + place.

With few pairs, programs of a GEMM read the experts of all of them and find their own. With many,
they are sorted by expert first: each program reads all pairs and places those of its own expert,
because the numbers are few, and one launch is less than the start of two.

Kernels overlap (PDL). The first GEMM waits for all that came before it,
and only then lets the second begin; so that one may find its rows before it waits itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.experts.expert_tuning import MAX_SEARCHED_PAIRS

CHUNK = 8192


@triton.jit
def found_rows(
    experts: tl.tensor,
    slot: tl.tensor,
    tile: tl.tensor,
    num_pairs: tl.tensor,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
) -> tl.tensor:
    """Returns the expert of `slot`, and the pairs of its `tile` [ROWS]: `num_pairs` for none.

    BY_PAIR: slot p stands for the expert of pair p, and only the first of its pairs has work.
    """
    pair = tl.arange(0, PAIRS)
    of_pair = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    expert = slot
    if BY_PAIR:
        expert = tl.load(experts + slot)
    own = (of_pair == expert) & (expert >= 0)
    rank = tl.cumsum(own.to(tl.int32), axis=0) - 1 - tile * ROWS
    if BY_PAIR:
        earlier = tl.sum((own & (pair < slot)).to(tl.int32), axis=0)
        own &= earlier == 0
    row = tl.arange(0, ROWS)
    is_row = own[None, :] & (rank[None, :] == row[:, None])
    return expert, num_pairs - tl.sum(tl.where(is_row, num_pairs - pair[None, :], 0), axis=1)


@triton.jit
def sorted_rows(
    order: tl.tensor,
    counts: tl.tensor,
    tile: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    FIRST: tl.constexpr,
) -> tl.tensor:
    """Returns the expert of the `tile`-th tile of all experts, and of the HEIGHT pairs that it has
    FIRST and on: their places among all that are sorted, and themselves, [ROWS]."""
    lane = tl.arange(0, EXPERTS)
    count = tl.load(counts + lane, mask=lane < num_experts, other=0)
    tiles = tl.cdiv(count, HEIGHT)
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    own = lane == expert
    before = tl.sum(tl.where(own, ends - tiles, 0), axis=0)
    start = tl.sum(tl.where(lane < expert, count, 0), axis=0)
    place = (tile - before) * HEIGHT + FIRST + tl.arange(0, ROWS)
    real = place < tl.sum(tl.where(own, count, 0), axis=0)
    return expert, start + place, tl.load(order + start + place, mask=real, other=num_pairs)


@triton.jit
def num_sorted_tiles(
    counts: tl.tensor, num_experts: tl.tensor, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr
) -> tl.tensor:
    """Returns how many tiles of HEIGHT rows all experts have."""
    lane = tl.arange(0, EXPERTS)
    count = tl.load(counts + lane, mask=lane < num_experts, other=0)
    return tl.sum(tl.cdiv(count, HEIGHT), axis=0)


@triton.jit
def tile_of_program(
    num_row_tiles: tl.tensor,
    num_col_tiles: tl.tensor,
    GROUP: tl.constexpr,
    LAST_APART: tl.constexpr,
    IN_FRONT: tl.constexpr,
) -> tl.tensor:
    """Returns the tile of rows and the tile of outputs of this program. GROUP tiles of rows are
    computed together, column by column; LAST_APART: the last column behind all others. IN_FRONT:
    as many programs do something else."""
    program = tl.program_id(0) - IN_FRONT
    columns = num_col_tiles - 1 if LAST_APART else num_col_tiles
    span = GROUP * columns
    first = program // span * GROUP
    height = tl.maximum(tl.minimum(num_row_tiles - first, GROUP), 1)
    tile, column = first + program % span % height, program % span // height
    if LAST_APART:
        behind = program - num_row_tiles * columns
        tile = tl.where(behind < 0, tile, behind)
        column = tl.where(behind < 0, column, columns)
    return tile, column


@triton.jit
def rows_of_program(
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_row_tiles: tl.tensor,
    num_col_tiles: tl.tensor,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SORTED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    HEIGHT: tl.constexpr = 0,
    FIRST: tl.constexpr = 0,
    LAST_APART: tl.constexpr = False,
    IN_FRONT: tl.constexpr = 0,
) -> tl.tensor:
    """Returns the expert, the pairs [ROWS] and the tile of outputs of this program. A program
    whose pairs are all `num_pairs` has no work. Sorted tiles may be of HEIGHT rows, of which these
    are FIRST and on; of these, the last tiles of outputs may be LAST_APART. IN_FRONT: as many
    programs do something else. GATED: of the first GEMM. With OVERLAP, what other kernels wrote can
    be read when this returns.
    """
    if OVERLAP and GATED:
        gdc_wait()
        gdc_launch_dependents()
    if LAST_APART:
        num_row_tiles = num_sorted_tiles(counts, num_experts, EXPERTS, HEIGHT or ROWS)
    tile, col_tile = tile_of_program(num_row_tiles, num_col_tiles, GROUP, LAST_APART, IN_FRONT)
    if SORTED:
        expert, _, pair = sorted_rows(
            order, counts, tile, num_pairs, num_experts, ROWS, EXPERTS, HEIGHT or ROWS, FIRST
        )
    else:
        expert, pair = found_rows(
            experts, tile // TILES, tile % TILES, num_pairs, ROWS, PAIRS, BY_PAIR
        )
    if OVERLAP and not GATED:
        gdc_launch_dependents()
        gdc_wait()
    return expert, pair, col_tile


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Places the pairs of expert e in program e, behind those of all lower experts.

    Lanes count for themselves, every CHUNK-th pair each, and come behind each other: sums over
    lanes are as many however many pairs there are.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        of_pair = tl.load(experts + first + lane, mask=first + lane < num_pairs, other=-1)
        lower += ((of_pair >= 0) & (of_pair < expert)).to(tl.int32)
        own += (of_pair == expert).to(tl.int32)
    count = tl.sum(own, axis=0)
    tl.store(counts + expert, count)
    if count > 0:
        place = order + tl.sum(lower, axis=0) + tl.cumsum(own, axis=0) - own
        for first in range(0, num_pairs, CHUNK):
            pair = first + lane
            of_pair = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
            is_own = of_pair == expert
            tl.store(place, pair, mask=is_own)
            place += is_own.to(tl.int32)


def sort_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the pairs of `experts` [T, k] int32, -1 for none.

    Returns:
        (order [T * k] int32, counts [E] int32): the pairs by expert, and how many each has.
    """
    num_pairs = experts.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    chunk = min(CHUNK, max(16, triton.next_power_of_2(num_pairs)))
    sort_pairs_kernel[(num_experts,)](
        experts, order, counts, num_pairs, CHUNK=chunk, num_warps=max(1, min(16, chunk // 256))
    )
    return order, counts


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Says how programs of a step's GEMMs find their rows.

    Attributes:
        experts: [T, k] int32; -1: none.
        num_experts: Of the layer.
        order, counts: As `sort_pairs` gives them; None: programs search.
    """

    experts: Tensor
    num_experts: int
    order: Tensor | None
    counts: Tensor | None

    @classmethod
    def of(
        cls, experts: Tensor, num_experts: int, searched: int = MAX_SEARCHED_PAIRS
    ) -> ExpertRows:
        """Sorts the pairs if there are more than `searched`, the most that programs search."""
        order = counts = None
        if experts.numel() > searched:
            order, counts = sort_pairs(experts, num_experts)
        return cls(experts, num_experts, order, counts)

    def tiles(self, rows: int, extra_rows: int = 0) -> tuple[int, dict[str, int]]:
        """Returns the number of tiles of `rows` rows that may have work, and the constants with
        which `rows_of_program` finds them. Sorted ones have `extra_rows` more."""
        num_pairs, top_k = self.experts.numel(), self.experts.shape[1]
        is_sorted = self.counts is not None
        height = rows + extra_rows if is_sorted else rows
        by_pair = not is_sorted and num_pairs <= self.num_experts
        # No token goes to an expert twice.
        of_expert = triton.cdiv(num_pairs // top_k, height)
        total = of_expert * (num_pairs if by_pair else self.num_experts)
        if is_sorted:
            total = min(triton.cdiv(num_pairs, height) + self.num_experts, total)
        return total, {
            "ROWS": rows,
            "PAIRS": 1 if is_sorted else max(16, triton.next_power_of_2(num_pairs)),
            "TILES": 1 if is_sorted else of_expert,
            "EXPERTS": triton.next_power_of_2(self.num_experts),
            "SORTED": is_sorted,
            "BY_PAIR": by_pair,
            "OVERLAP": self.overlaps,
        }

    @property
    def overlaps(self) -> bool:
        """Returns whether kernels begin before the ones in front have ended."""
        return uses_pdl(self.experts.device)

    @property
    def launch(self) -> dict[str, bool]:
        """Returns the options of a launch that fits `OVERLAP`."""
        return {"launch_pdl": True} if self.overlaps else {}
