"""All-gather and reduce-scatter of rows, each in one launch, by writes into other ranks' memory.

    gather     1. write the own rows into all other ranks' memory (`peer_memory`), and into the
                  result
               2. tell every rank, wait for every rank
               3. copy what the others wrote into the result
    scatter    1. write the rows of rank p into the memory of rank p
               2. tell, wait
               3. add the own rows and what the others wrote, in order of ranks

A scatter is the first of an all-reduce's two shots, and its bits are those of `peer_reduce`. The
gather pads, and its second tensor travels in the same launch: neither is a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.collectives.peer_memory import (
    VECTOR,
    RankMemories,
    ReduceTuning,
    begin_call,
    end_call,
    numbers_at,
    sum_of_ranks,
    tell_and_wait,
    write_slices,
    write_to_others,
)
from tandem_kernels.collectives.peer_reduce import reduce_tuning

_WORD_BYTES = 4
_SLOT_BYTES = 8
_FEW = tl.constexpr(256)
"""Slots that a program copies at a time: there are hundreds of words for each."""


@triton.jit
def _send_rows(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    region: tl.tensor,
    num_own: tl.tensor,
    num_numbers: tl.tensor,
    PADDING: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Writes `x`, filled up with `PADDING` to `num_numbers`, to this rank's place in the region of
    all others' memory, and in `out`."""
    lane = tl.arange(0, SIZE)
    for start in range(tl.program_id(0) * SIZE, num_numbers, tl.num_programs(0) * SIZE):
        place = start + lane
        inside = place < num_numbers
        given = tl.load(x + place, mask=place < num_own, other=PADDING)
        write_to_others(addresses, region, RANK * num_numbers + place, given, inside, RANK, RANKS)
        tl.store(out + RANK * num_numbers + place, given, mask=inside)


@triton.jit
def _take_rows(
    out: tl.tensor,
    addresses: tl.tensor,
    region: tl.tensor,
    num_numbers: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Copies what all others wrote to the region of the own memory into `out`."""
    lane = tl.arange(0, SIZE)
    mine = numbers_at(tl.load(addresses + RANK) + region, out.dtype.element_ty)
    for start in range(tl.program_id(0) * SIZE, num_numbers, tl.num_programs(0) * SIZE):
        of_rank = start + lane
        inside = of_rank < num_numbers
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = peer * num_numbers + of_rank
                found = tl.load(mine + place, mask=inside, other=0, cache_modifier=".cg")
                tl.store(out + place, found, mask=inside)


@triton.jit(do_not_specialize=["num_own_rows", "num_rows"])
def peer_gather_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    slots_out: tl.tensor,
    addresses: tl.tensor,
    num_own_words: tl.tensor,
    num_words: tl.tensor,
    num_own_rows: tl.tensor,
    num_rows: tl.tensor,
    half_bytes: tl.tensor,
    slots_at: tl.tensor,
    HEADER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEQUENCE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Gathers `x`, `num_own_words` words, with `slots`, one a row. Each rank has place for
    `num_words` words and `num_rows` slots; those are `slots_at` bytes behind all words."""
    block = tl.program_id(0)
    own, call, half = begin_call(addresses, RANK, SEQUENCE)
    words = HEADER + half * half_bytes
    rows = words + slots_at
    _send_rows(x, out, addresses, words, num_own_words, num_words, 0, RANK, RANKS, SIZE)
    _send_rows(slots, slots_out, addresses, rows, num_own_rows, num_rows, -1, RANK, RANKS, _FEW)
    tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
    _take_rows(out, addresses, words, num_words, RANK, RANKS, SIZE)
    _take_rows(slots_out, addresses, rows, num_rows, RANK, RANKS, _FEW)
    end_call(own, call, tl.num_programs(0), SEQUENCE)


@triton.jit
def peer_scatter_kernel(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    part: tl.tensor,
    half_bytes: tl.tensor,
    HEADER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEQUENCE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Adds the `part` numbers of this rank in `x` of all ranks, each of which has RANKS * part."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = x.dtype.element_ty
    own, call, half = begin_call(addresses, RANK, SEQUENCE)
    inputs = HEADER + half * half_bytes
    write_slices(x, addresses, inputs, RANKS * part, part, RANK, RANKS, SIZE)
    tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for start in range(block * SIZE, part, blocks * SIZE):
        place = start + tl.arange(0, SIZE)
        inside = place < part
        given = x + RANK * part + place
        total = sum_of_ranks(given, mine + place, part, inside, RANK, RANKS, SIZE)
        tl.store(out + place, total.to(kind), mask=inside)
    end_call(own, call, blocks, SEQUENCE)


def gathers(num_rows: int, width: int, itemsize: int, memory: RankMemories) -> bool:
    """Returns whether there is room for `num_rows` rows of every rank, of whole vectors."""
    row_bytes = width * itemsize
    needed = memory.ranks * num_rows * (row_bytes + _SLOT_BYTES)
    return row_bytes % (VECTOR * _WORD_BYTES) == 0 and 0 < needed <= memory.half_bytes


def scatters(x: Tensor, memory: RankMemories) -> bool:
    """Returns whether there is room for the parts of `x`, which are whole vectors of numbers that
    are added in float32."""
    part, rest = divmod(x.numel(), memory.ranks)
    return (
        x.is_floating_point()
        and x.element_size() in (2, 4)
        and rest == 0
        and part % VECTOR == 0
        and 0 < x.numel() * x.element_size() <= memory.half_bytes
    )


def peer_gather(
    x: Tensor,
    slot_mapping: Tensor,
    num_rows: int,
    memory: RankMemories,
    tuning: ReduceTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the rows and slots of all ranks, which all call this alike, in turn.

    Args:
        x: [T, H], contiguous; only what `gathers` takes.
        slot_mapping: [T] int64, contiguous.
        num_rows: Rows of each rank in the results, the same on all: at least T.
        tuning: The same on all ranks; None: `reduce_tuning` for words of four bytes.

    Returns:
        ([ranks * num_rows, H], [ranks * num_rows]): rows that a rank lacks are zeros, in slot -1.
    """
    num_own, width = x.shape
    row_words = width * x.element_size() // _WORD_BYTES
    out = x.new_empty((memory.ranks * num_rows, width))
    slots_out = slot_mapping.new_empty(len(out))
    num_words = num_rows * row_words
    tuning = tuning or reduce_tuning(num_words)
    peer_gather_kernel[(tuning.num_blocks(num_words),)](
        x.view(torch.int32),
        slot_mapping,
        out.view(torch.int32),
        slots_out,
        memory.addresses,
        num_own * row_words,
        num_words,
        num_own,
        num_rows,
        memory.half_bytes,
        memory.ranks * num_words * _WORD_BYTES,
        **memory.constants,
        SIZE=tuning.size,
        num_warps=tuning.num_warps,
    )
    return out, slots_out


def peer_scatter(x: Tensor, memory: RankMemories, tuning: ReduceTuning | None = None) -> Tensor:
    """Returns [n, ...] of the sum of `x` [ranks * n, ...] over ranks: this rank's rows. All ranks
    call this alike, in turn. `x`: contiguous; only what `scatters` takes. `tuning`: None:
    `reduce_tuning`."""
    out = x.new_empty((len(x) // memory.ranks, *x.shape[1:]))
    tuning = tuning or reduce_tuning(out.numel())
    peer_scatter_kernel[(tuning.num_blocks(out.numel()),)](
        x,
        out,
        memory.addresses,
        out.numel(),
        memory.half_bytes,
        **memory.constants,
        SIZE=tuning.size,
        num_warps=tuning.num_warps,
    )
    return out
