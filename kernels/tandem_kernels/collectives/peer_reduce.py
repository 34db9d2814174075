"""All-reduce of small messages in one launch, by writes into other ranks' memory (`peer_memory`).

    one-shot  1. write the own input into all other ranks' memory
              2. tell every rank, wait for every rank
              3. add the own input and what the others wrote, in order of ranks
    two-shot  1. write slice p of the own input into the memory of rank p
              2. tell, wait
              3. add the own slice and what the others wrote, in order; write the sums into all
                 other ranks' results
              4. tell, wait, copy the others' slices of the result

One-shot writes the message once for each other rank, two-shot moves each number twice: the first
has one wait fewer, the other fewer bytes with more than two ranks. Either way every rank gets the
same bits, those of a sum in float32 in the order of ranks, rounded once. Writes, since nothing
waits for them one by one, as one would for reads of other ranks' memory.

Nothing here is launched ahead of the kernel before it (PDL): the end of a call must mean that all
of its reads are done. Calls of a rank follow each other; two streams at a time are not for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.collectives.peer_memory import (
    FLAG_BLOCKS,
    VECTOR,
    RankMemories,
    ReduceTuning,
    begin_call,
    end_call,
    numbers_at,
    padded,
    sum_of_ranks,
    tell_and_wait,
    write_slices,
    write_to_others,
)

_FEW_NUMBERS = 1 << 14
_MANY_NUMBERS = 1 << 20


def reduce_tuning(num_numbers: int) -> ReduceTuning:
    """Returns what is within some percent of the best for two and for four ranks: more programs for
    more numbers. `python -m bench.engine.all_reduce --tune` times others."""
    if num_numbers <= _FEW_NUMBERS:
        return ReduceTuning(blocks=64, size=1024, num_warps=4)
    blocks = 64 if num_numbers <= _MANY_NUMBERS else FLAG_BLOCKS
    return ReduceTuning(blocks=blocks, size=2048, num_warps=8)


@triton.jit
def _one_shot(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    number: tl.tensor,
    half: tl.tensor,
    num_numbers: tl.tensor,
    part: tl.tensor,
    inputs: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Adds up in one shot. Rank r's numbers have place r * part in the others' memory."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = x.dtype.element_ty
    lane = tl.arange(0, SIZE)
    for start in range(block * SIZE, num_numbers, blocks * SIZE):
        place = start + lane
        inside = place < num_numbers
        given = tl.load(x + place, mask=inside)
        write_to_others(addresses, inputs, RANK * part + place, given, inside, RANK, RANKS)
    tell_and_wait(addresses, number, block, half, RANK, RANKS, BLOCKS, SLOTS)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for start in range(block * SIZE, num_numbers, blocks * SIZE):
        place = start + lane
        inside = place < num_numbers
        total = sum_of_ranks(x + place, mine + place, part, inside, RANK, RANKS, SIZE)
        tl.store(out + place, total.to(kind), mask=inside)


@triton.jit
def _two_shot(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    number: tl.tensor,
    half: tl.tensor,
    num_numbers: tl.tensor,
    part: tl.tensor,
    inputs: tl.tensor,
    results: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Adds up in two shots. A slice has `part` numbers, the last one fewer."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = x.dtype.element_ty
    lane = tl.arange(0, SIZE)
    write_slices(x, addresses, inputs, num_numbers, part, RANK, RANKS, SIZE)
    tell_and_wait(addresses, number, block, half, RANK, RANKS, BLOCKS, SLOTS)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for start in range(block * SIZE, part, blocks * SIZE):
        of_slice = start + lane
        place = RANK * part + of_slice
        inside = (of_slice < part) & (place < num_numbers)
        total = sum_of_ranks(x + place, mine + of_slice, part, inside, RANK, RANKS, SIZE)
        tl.store(out + place, total.to(kind), mask=inside)
        write_to_others(addresses, results, place, total.to(kind), inside, RANK, RANKS)
    tell_and_wait(addresses, number + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
    added = numbers_at(tl.load(addresses + RANK) + results, kind)
    for start in range(block * SIZE, part, blocks * SIZE):
        of_slice = start + lane
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = peer * part + of_slice
                inside = (of_slice < part) & (place < num_numbers)
                found = tl.load(added + place, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(out + place, found, mask=inside)


@triton.jit(do_not_specialize=["vectors"])
def peer_reduce_kernel(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_numbers: tl.tensor,
    vectors: tl.tensor,
    most: tl.tensor,
    HEADER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEQUENCE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Adds `x` [n] of all ranks. `addresses`: [RANKS] int64 of their memories; `vectors`: of eight
    numbers, a slice or a message with those that align the next one; `most`: numbers that an input,
    or a result, has room for."""
    own, call, half = begin_call(addresses, RANK, SEQUENCE)
    number = 2 * call + 1
    # Not `multiple_of` an argument: Triton 3.7 forgets it, and stores one number at a time.
    part = vectors * 8
    itemsize: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    inputs = HEADER + 2 * half * most * itemsize
    if TWO_SHOT:
        _two_shot(
            x, out, addresses, number, half, num_numbers, part, inputs, inputs + most * itemsize,
            RANK, RANKS, BLOCKS, SLOTS, SIZE,
        )  # fmt: skip
    else:
        _one_shot(
            x, out, addresses, number, half, num_numbers, part, inputs,
            RANK, RANKS, BLOCKS, SLOTS, SIZE,
        )  # fmt: skip
    end_call(own, call, tl.num_programs(0), SEQUENCE)


def peer_reduce(
    x: Tensor, memory: RankMemories, *, two_shot: bool, tuning: ReduceTuning | None = None
) -> Tensor:
    """Returns the sum of `x` over ranks, which all call this alike, in turn.

    Args:
        x: [n], contiguous, of float32 or half precision, of at most the memory's `max_bytes`.
        two_shot: What one shot has no room for goes in two in any case.
        tuning: None: `reduce_tuning`.
    """
    out = torch.empty_like(x)
    num_numbers, itemsize = x.numel(), x.element_size()
    two_shot = two_shot or not memory.fits_one_shot(num_numbers, itemsize)
    part = padded(triton.cdiv(num_numbers, memory.ranks) if two_shot else num_numbers)
    tuning = tuning or reduce_tuning(part)
    peer_reduce_kernel[(tuning.num_blocks(part),)](
        x,
        out,
        memory.addresses,
        num_numbers,
        part // VECTOR,
        memory.room(itemsize),
        **memory.constants,
        TWO_SHOT=two_shot,
        SIZE=tuning.size,
        num_warps=tuning.num_warps,
    )
    return out
