"""All-reduce by writes into other ranks' memory (`peer_memory`), which nobody waits for one by one.

    one-shot  1. write the own input into all other ranks' memory
              2. tell every rank, wait for every rank
              3. add the own input and what the others wrote, in order of ranks
    two-shot  1. write slice p of the own input into the memory of rank p
              2. tell, wait
              3. add the own slice and what the others wrote, in order; write the sums into all
                 other ranks' results
              4. tell, wait, copy the others' slices of the result

Beside `peer_reduce`, which reads: what crosses the links is the same, but a rank's own input is not
copied, nor its own slice of the result. Of two ranks one-shot moves no more bytes than two-shot.
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
    VECTOR,
    ReduceTuning,
    end_call,
    numbers_at,
    room_of_half,
    tell_and_wait,
)

_FEW_NUMBERS = 1 << 16


def push_tuning(num_numbers: int) -> ReduceTuning:
    """Returns what is likely best: a few KiB in many programs for few numbers, and for many what a
    link has in flight, some 600 KB. `python -m bench.engine.all_reduce --tune` times others."""
    if num_numbers <= _FEW_NUMBERS:
        return ReduceTuning(blocks=32, size=2048, num_warps=8)
    return ReduceTuning(blocks=64, size=8192, num_warps=16)


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
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                theirs = numbers_at(tl.load(addresses + peer) + inputs, kind)
                tl.store(theirs + RANK * part + place, given, mask=inside)
    tell_and_wait(addresses, number, block, half, RANK, RANKS, BLOCKS, SLOTS, False)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for start in range(block * SIZE, num_numbers, blocks * SIZE):
        place = start + lane
        inside = place < num_numbers
        total = tl.zeros([SIZE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            else:
                got = mine + peer * part + place
                found = tl.load(got, mask=inside, other=0.0, cache_modifier=".cg")
                total += found.to(tl.float32)
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
    for start in range(block * SIZE, part, blocks * SIZE):
        of_slice = start + lane
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = peer * part + of_slice
                inside = (of_slice < part) & (place < num_numbers)
                given = tl.load(x + place, mask=inside)
                theirs = numbers_at(tl.load(addresses + peer) + inputs, kind)
                tl.store(theirs + RANK * part + of_slice, given, mask=inside)
    tell_and_wait(addresses, number, block, half, RANK, RANKS, BLOCKS, SLOTS, False)
    mine = numbers_at(tl.load(addresses + RANK) + inputs, kind)
    for start in range(block * SIZE, part, blocks * SIZE):
        of_slice = start + lane
        place = RANK * part + of_slice
        inside = (of_slice < part) & (place < num_numbers)
        total = tl.zeros([SIZE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            else:
                got = mine + peer * part + of_slice
                found = tl.load(got, mask=inside, other=0.0, cache_modifier=".cg")
                total += found.to(tl.float32)
        tl.store(out + place, total.to(kind), mask=inside)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                theirs = numbers_at(tl.load(addresses + peer) + results, kind)
                tl.store(theirs + place, total.to(kind), mask=inside)
    tell_and_wait(addresses, number + 1, block, half, RANK, RANKS, BLOCKS, SLOTS, False)
    added = numbers_at(tl.load(addresses + RANK) + results, kind)
    for start in range(block * SIZE, part, blocks * SIZE):
        of_slice = start + lane
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = peer * part + of_slice
                inside = (of_slice < part) & (place < num_numbers)
                found = tl.load(added + place, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(out + place, found, mask=inside)


@triton.jit
def peer_push_kernel(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_numbers: tl.tensor,
    part: tl.tensor,
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
    """Adds `x` [n] of all ranks; arguments as those of `peer_reduce_kernel`. `part`: numbers of a
    slice, or of a message, with those that align the next one."""
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    call = tl.load(own + SEQUENCE, volatile=True)
    half = call % 2
    number = 2 * call + 1
    part = tl.multiple_of(part, 8)
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


def one_shot_fits(num_numbers: int, itemsize: int, ranks: int, max_bytes: int) -> bool:
    """Returns whether a half of the memory takes a message from every rank."""
    part = -(-num_numbers // VECTOR) * VECTOR
    return ranks * part <= 2 * room_of_half(max_bytes, itemsize)


def peer_push(
    x: Tensor,
    addresses: Tensor,
    rank: int,
    max_bytes: int,
    *,
    two_shot: bool,
    tuning: ReduceTuning | None = None,
) -> Tensor:
    """Returns the sum of `x` over ranks, which all call this alike, in turn.

    Args:
        x, addresses: As `peer_reduce` takes them. What one shot has no room for goes in two.
        tuning: None: `push_tuning`.
    """
    out = torch.empty_like(x)
    num_numbers, ranks = x.numel(), len(addresses)
    two_shot = two_shot or not one_shot_fits(num_numbers, x.element_size(), ranks, max_bytes)
    part = triton.cdiv(triton.cdiv(num_numbers, ranks if two_shot else 1), VECTOR) * VECTOR
    tuning = tuning or push_tuning(part)
    peer_push_kernel[(tuning.num_blocks(part),)](
        x,
        out,
        addresses,
        num_numbers,
        part,
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
