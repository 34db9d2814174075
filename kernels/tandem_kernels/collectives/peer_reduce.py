"""All-reduce of small messages in one launch, over memory that all ranks map (`peer_memory`).

    one-shot  1. copy the own input to the own memory
              2. tell every rank, wait for every rank
              3. read all inputs, add in order of ranks
    two-shot  1., 2. the same
              3. add slice r of all inputs, in order, into all ranks' results
              4. tell, wait, copy the result

One-shot reads the message of every rank, two-shot moves each number twice: the first is quicker for
few bytes, the other for many. Either way every rank gets the same bits. `peer_push` does the same
by writes alone.

Nothing here is launched ahead of the kernel before it (PDL): the end of a call must mean that all
of its reads are done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.collectives.peer_memory import (
    FLAG_BLOCKS,
    HEADER_BYTES,
    MAX_RANKS,
    SEQUENCE,
    ReduceTuning,
    end_call,
    numbers_at,
    room_of_half,
    tell_and_wait,
)

TUNING = ReduceTuning(blocks=32, size=2048, num_warps=8)


@triton.jit
def peer_reduce_kernel(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_numbers: tl.tensor,
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
    """Adds `x` [n] of all ranks. `addresses`: [RANKS] int64 of their memories; `most`: numbers that
    an input, or a result, has room for."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lane = tl.arange(0, SIZE)
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    call = tl.load(own + SEQUENCE, volatile=True)
    half = call % 2
    kind: tl.constexpr = x.dtype.element_ty
    inputs = HEADER + 2 * half * most * (kind.primitive_bitwidth // 8)
    results = inputs + most * (kind.primitive_bitwidth // 8)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    slice_size = tl.cdiv(tl.cdiv(num_numbers, RANKS), SIZE) * SIZE
    if TWO_SHOT:
        for of_rank in tl.static_range(RANKS):
            for start in range(block * SIZE, slice_size, blocks * SIZE):
                place = of_rank * slice_size + start + lane
                inside = place < num_numbers
                tl.store(mine + place, tl.load(x + place, mask=inside), mask=inside)
        tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS, True)
        for start in range(block * SIZE, slice_size, blocks * SIZE):
            place = RANK * slice_size + start + lane
            inside = place < num_numbers
            total = tl.zeros([SIZE], tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = numbers_at(tl.load(addresses + peer) + inputs, kind)
                part = tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = numbers_at(tl.load(addresses + peer) + results, kind)
                tl.store(theirs + place, total.to(kind), mask=inside)
        tell_and_wait(addresses, 2 * call + 2, block, half, RANK, RANKS, BLOCKS, SLOTS, True)
        added = numbers_at(tl.load(addresses + RANK) + results, kind)
        for of_rank in tl.static_range(RANKS):
            for start in range(block * SIZE, slice_size, blocks * SIZE):
                place = of_rank * slice_size + start + lane
                inside = place < num_numbers
                found = tl.load(added + place, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(out + place, found, mask=inside)
    else:
        for start in range(block * SIZE, num_numbers, blocks * SIZE):
            place = start + lane
            inside = place < num_numbers
            tl.store(mine + place, tl.load(x + place, mask=inside), mask=inside)
        tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS, True)
        for start in range(block * SIZE, num_numbers, blocks * SIZE):
            place = start + lane
            inside = place < num_numbers
            total = tl.zeros([SIZE], tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = numbers_at(tl.load(addresses + peer) + inputs, kind)
                part = tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            tl.store(out + place, total.to(kind), mask=inside)
    end_call(own, call, blocks, SEQUENCE)


def peer_reduce(
    x: Tensor,
    addresses: Tensor,
    rank: int,
    max_bytes: int,
    *,
    two_shot: bool,
    tuning: ReduceTuning = TUNING,
) -> Tensor:
    """Returns the sum of `x` over ranks, which all call this alike, in turn.

    Args:
        x: Contiguous, of float32 or half precision, of at most `max_bytes`.
        addresses: [ranks] int64 on the device of `x`, of each rank's memory: `memory_bytes` zeroed
            bytes, as this process maps them.
    """
    out = torch.empty_like(x)
    num_numbers, ranks = x.numel(), len(addresses)
    blocks = tuning.num_blocks(num_numbers // ranks if two_shot else num_numbers)
    peer_reduce_kernel[(blocks,)](
        x,
        out,
        addresses,
        num_numbers,
        room_of_half(max_bytes, x.element_size()),
        HEADER=HEADER_BYTES,
        RANK=rank,
        RANKS=ranks,
        TWO_SHOT=two_shot,
        BLOCKS=FLAG_BLOCKS,
        SLOTS=MAX_RANKS,
        SEQUENCE=SEQUENCE,
        SIZE=tuning.size,
        num_warps=tuning.num_warps,
    )
    return out
