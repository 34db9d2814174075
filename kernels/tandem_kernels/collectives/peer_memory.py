"""Memory that all ranks of a host map, as kernels that exchange numbers over it see it.

    memory of a rank    flags [2, ranks, blocks] | sequence, tickets | half | half
    half                input [n] | result [n]           of an all-reduce
                        rows of rank 0 | rank 1 | ...    of an all-gather or reduce-scatter

Ranks write to the one behind them first, then to the next: were they all to begin with rank 0, its
links would be full and all others idle.

Calls are counted on the device, so that a replayed graph goes on counting, and halves of the memory
take turns: a rank in call k + 2 has seen all others in call k + 1, so nothing reads or writes what
call k left. Each block waits for the same block of the other ranks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

MAX_RANKS = 16
FLAG_BLOCKS = 128
"""Blocks that there are flags for."""
HEADER_BYTES = 1 << 15
"""Flags, the sequence and the tickets take less."""
SEQUENCE = 2 * MAX_RANKS * FLAG_BLOCKS
"""Index of the sequence number; the ticket counter is behind it."""
VECTOR = 8
"""Numbers to whose multiples parts of a message are aligned."""
_PADDING_BYTES = MAX_RANKS * VECTOR * 4
_COMPILED = tl.constexpr(not knobs.runtime.interpret)
"""Triton's interpreter has no fences, and needs none on x86: stores are seen in their order."""


@dataclass(frozen=True, slots=True)
class ReduceTuning:
    """Says how a message is shared out.

    Attributes:
        blocks: Programs at most, up to `FLAG_BLOCKS`. Those that wait keep an SM.
        size: Numbers that a program copies or adds at a time: what it has in flight.
    """

    blocks: int
    size: int
    num_warps: int

    def num_blocks(self, num_numbers: int) -> int:
        """Returns the number of programs for this many numbers."""
        return max(1, min(self.blocks, -(-num_numbers // self.size)))


def memory_bytes(max_bytes: int) -> int:
    """Returns how much memory a rank shares for messages of up to `max_bytes`."""
    return HEADER_BYTES + 4 * (max_bytes + _PADDING_BYTES)


def padded(num_numbers: int) -> int:
    """Returns the numbers of a message with those that align the next one."""
    return -(-num_numbers // VECTOR) * VECTOR


@dataclass(frozen=True, slots=True)
class RankMemories:
    """The memory of all ranks, as rank `rank` maps it.

    Attributes:
        addresses: [ranks] int64 on the rank's device, of each rank's memory: `memory_bytes` zeroed
            bytes, as this process maps them.
        max_bytes: Of a message.
    """

    addresses: Tensor
    rank: int
    max_bytes: int

    @property
    def ranks(self) -> int:
        return len(self.addresses)

    def room(self, itemsize: int) -> int:
        """Returns how many numbers an input, or a result, has room for."""
        return (self.max_bytes + _PADDING_BYTES) // itemsize

    @property
    def half_bytes(self) -> int:
        """Returns what a call may write into a rank's memory."""
        return 2 * (self.max_bytes + _PADDING_BYTES)

    def fits_one_shot(self, num_numbers: int, itemsize: int) -> bool:
        """Returns whether a half of the memory takes a message from every rank."""
        return self.ranks * padded(num_numbers) <= 2 * self.room(itemsize)

    @property
    def constants(self) -> dict[str, int]:
        """Returns the arguments that kernels are compiled for, and which all of them take."""
        return {
            "HEADER": HEADER_BYTES,
            "RANK": self.rank,
            "RANKS": self.ranks,
            "BLOCKS": FLAG_BLOCKS,
            "SLOTS": MAX_RANKS,
            "SEQUENCE": SEQUENCE,
        }


@triton.jit
def numbers_at(address: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns a pointer to numbers whose place is known to allow loads of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def fence_system() -> None:
    """Orders what the program did before a barrier in front of this with what its first warp does
    next, for all devices. One fence stands for the flags of all ranks: a release of its own for
    each would wait until the flag before it has arrived."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred is_first;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.lt.u32 is_first, thread, 32;
                @is_first fence.acq_rel.sys;
                mov.b32 $0, 0;
            }
            """,
            "=r", [], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def acquired(place: tl.tensor) -> tl.tensor:
    """Returns the flag at `place`, after which each thread sees what was written before it."""
    if _COMPILED:
        flag = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [place], tl.int32, False, 1
        )
    else:
        flag = tl.load(place, volatile=True)
    return flag


@triton.jit
def tell_and_wait(
    addresses: tl.tensor,
    number: tl.tensor,
    block: tl.tensor,
    half: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Writes `number` where each other rank's block looks for this rank, and waits for theirs: it,
    or the second one of the same call. Any other is of a former call, larger ones as well, because
    numbers wrap around: only long messages use all blocks, and the last may be days ago."""
    rank = tl.arange(0, SLOTS)
    is_other = (rank < RANKS) & (rank != RANK)
    flags = tl.load(addresses + rank, mask=is_other, other=0).to(tl.pointer_type(tl.int32))
    flags += (half * SLOTS + RANK) * BLOCKS + block
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32)) + half * SLOTS * BLOCKS + block
    tl.debug_barrier()
    fence_system()
    tl.atomic_xchg(flags, number, mask=is_other, sem="relaxed", scope="sys")
    missing = number | 1
    while missing != 0:
        missing = number - number
        for step in tl.static_range(1, RANKS):
            missing |= (acquired(own + (RANK + step) % RANKS * BLOCKS) - number) >> 1


@triton.jit
def write_to_others(
    addresses: tl.tensor,
    region: tl.tensor,
    place: tl.tensor,
    numbers: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Writes numbers to a place of the same region of all other ranks' memory."""
    for step in tl.static_range(1, RANKS):
        theirs = numbers_at(tl.load(addresses + (RANK + step) % RANKS) + region, numbers.dtype)
        tl.store(theirs + place, numbers, mask=inside)


@triton.jit
def write_slices(
    x: tl.tensor,
    addresses: tl.tensor,
    region: tl.tensor,
    num_numbers: tl.tensor,
    part: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Writes slice p of `x`, `part` numbers and in the last one fewer, to rank p's place for those
    of this rank, except its own."""
    lane = tl.arange(0, SIZE)
    for start in range(tl.program_id(0) * SIZE, part, tl.num_programs(0) * SIZE):
        of_slice = start + lane
        for step in tl.static_range(1, RANKS):
            peer = (RANK + step) % RANKS
            place = peer * part + of_slice
            inside = (of_slice < part) & (place < num_numbers)
            given = tl.load(x + place, mask=inside)
            theirs = numbers_at(tl.load(addresses + peer) + region, x.dtype.element_ty)
            tl.store(theirs + RANK * part + of_slice, given, mask=inside)


@triton.jit
def sum_of_ranks(
    own: tl.tensor,
    written: tl.tensor,
    part: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Adds [SIZE] numbers of all ranks in their order, in float32. `own`: pointers to this rank's;
    `written`: to where rank 0 writes its own, rank r `part` numbers times r behind."""
    total = tl.zeros([SIZE], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += tl.load(own, mask=inside, other=0.0).to(tl.float32)
        else:
            theirs = written + peer * part
            found = tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
            total += found.to(tl.float32)
    return total


@triton.jit
def begin_call(
    addresses: tl.tensor, RANK: tl.constexpr, SEQUENCE_INDEX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the own flags, the number of this call, and which half of the memory it uses. Numbers
    wrap around after 2^31 calls, and are negative then."""
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    call = tl.load(own + SEQUENCE_INDEX, volatile=True)
    return own, call, call & 1


@triton.jit
def end_call(
    own: tl.tensor, call: tl.tensor, blocks: tl.tensor, SEQUENCE_INDEX: tl.constexpr
) -> None:
    """Counts the call in the last block to end: all have read the sequence by then."""
    tl.debug_barrier()
    ended = tl.atomic_add(own + SEQUENCE_INDEX + 1, 1, sem="acq_rel", scope="gpu")
    if ended == blocks - 1:
        tl.store(own + SEQUENCE_INDEX + 1, 0)
        tl.store(own + SEQUENCE_INDEX, call + 1)
