"""All-reduce of small messages over memory that all ranks of a host map: one launch, any graph.

    memory of a rank     flags [2, ranks, blocks] | sequence, tickets | input [2, n] | result [2, n]

    one-shot  1. copy the own input to the own memory
              2. tell every rank, wait for every rank
              3. read all inputs, add in order of ranks
    two-shot  1., 2. the same
              3. add slice r of all inputs, in order, into all ranks' results
              4. tell, wait, copy the result

One-shot reads the message of every rank, two-shot moves each number twice: the first is quicker for
few bytes, the other for many. Either way every rank gets the same bits.

Calls are counted on the device, so that a replayed graph goes on counting, and halves of the memory
take turns: a rank in call k + 2 has seen all others in call k + 1, so nobody reads what call k
left. Each block waits for the same block of the other ranks alone. Blocks that wait keep an SM, so
there are few.

Nothing here is launched ahead of the kernel before it (PDL): the end of a call must mean that all
of its reads are done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCKS = 32
BLOCK = 2048
"""Numbers that a block copies or adds at a time."""
HEADER_BYTES = 1 << 13
"""Flags, the sequence and the tickets take less, for up to 16 ranks."""
MAX_RANKS = 16
_SEQUENCE = 2 * MAX_RANKS * MAX_BLOCKS
"""Index of the sequence number; the ticket counter is behind it."""


@triton.jit
def _numbers_at(address: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns a pointer to numbers whose place is known to allow loads of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def _tell_and_wait(
    addresses: tl.tensor,
    number: tl.tensor,
    block: tl.tensor,
    half: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Writes `number` where each rank's block looks for this rank, and waits for theirs."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        flags = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
        place = flags + (half * SLOTS + RANK) * BLOCKS + block
        tl.atomic_xchg(place, number, sem="release", scope="sys")
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        place = own + (half * SLOTS + peer) * BLOCKS + block
        while tl.atomic_add(place, 0, sem="acquire", scope="sys") - number < 0:
            pass
    tl.debug_barrier()


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
    a half of each has room for."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lane = tl.arange(0, SIZE)
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    call = tl.load(own + SEQUENCE, volatile=True)
    half = call % 2
    kind: tl.constexpr = x.dtype.element_ty
    inputs = HEADER + half * most * (kind.primitive_bitwidth // 8)
    results = HEADER + (2 + half) * most * (kind.primitive_bitwidth // 8)
    mine = _numbers_at(tl.load(addresses + RANK) + inputs, kind)
    slice_size = tl.cdiv(tl.cdiv(num_numbers, RANKS), SIZE) * SIZE
    if TWO_SHOT:
        for of_rank in tl.static_range(RANKS):
            for start in range(block * SIZE, slice_size, blocks * SIZE):
                place = of_rank * slice_size + start + lane
                inside = place < num_numbers
                tl.store(mine + place, tl.load(x + place, mask=inside), mask=inside)
        _tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
        for start in range(block * SIZE, slice_size, blocks * SIZE):
            place = RANK * slice_size + start + lane
            inside = place < num_numbers
            total = tl.zeros([SIZE], tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = _numbers_at(tl.load(addresses + peer) + inputs, kind)
                part = tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = _numbers_at(tl.load(addresses + peer) + results, kind)
                tl.store(theirs + place, total.to(kind), mask=inside)
        _tell_and_wait(addresses, 2 * call + 2, block, half, RANK, RANKS, BLOCKS, SLOTS)
        added = _numbers_at(tl.load(addresses + RANK) + results, kind)
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
        _tell_and_wait(addresses, 2 * call + 1, block, half, RANK, RANKS, BLOCKS, SLOTS)
        for start in range(block * SIZE, num_numbers, blocks * SIZE):
            place = start + lane
            inside = place < num_numbers
            total = tl.zeros([SIZE], tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = _numbers_at(tl.load(addresses + peer) + inputs, kind)
                part = tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            tl.store(out + place, total.to(kind), mask=inside)
    # The last block to end counts the call: all have read the sequence by then.
    tl.debug_barrier()
    ended = tl.atomic_add(own + SEQUENCE + 1, 1, sem="acq_rel", scope="gpu")
    if ended == blocks - 1:
        tl.store(own + SEQUENCE + 1, 0)
        tl.store(own + SEQUENCE, call + 1)


def memory_bytes(max_bytes: int) -> int:
    """Returns how much memory a rank shares for messages of up to `max_bytes`."""
    return HEADER_BYTES + 4 * max_bytes


def peer_reduce(
    x: Tensor, addresses: Tensor, rank: int, max_bytes: int, *, two_shot: bool
) -> Tensor:
    """Returns the sum of `x` over ranks, which all call this alike, in turn.

    Args:
        x: Contiguous, of float32 or half precision, of at most `max_bytes`.
        addresses: [ranks] int64 on the device of `x`, of each rank's memory: `memory_bytes` zeroed
            bytes, as this process maps them.
    """
    out = torch.empty_like(x)
    num_numbers, ranks = x.numel(), len(addresses)
    per_block = num_numbers // ranks if two_shot else num_numbers
    blocks = max(1, min(MAX_BLOCKS, triton.cdiv(per_block, BLOCK)))
    peer_reduce_kernel[(blocks,)](
        x,
        out,
        addresses,
        num_numbers,
        max_bytes // x.element_size(),
        HEADER=HEADER_BYTES,
        RANK=rank,
        RANKS=ranks,
        TWO_SHOT=two_shot,
        BLOCKS=MAX_BLOCKS,
        SLOTS=MAX_RANKS,
        SEQUENCE=_SEQUENCE,
        SIZE=BLOCK,
        num_warps=8,
    )
    return out
