"""Memory that all ranks of a host map, as kernels that add up over it see it.

    memory of a rank    flags [2, ranks, blocks] | sequence, tickets | half | half
    half                input [n] | result [n]

Calls are counted on the device, so that a replayed graph goes on counting, and halves of the memory
take turns: a rank in call k + 2 has seen all others in call k + 1, so nobody reads or writes what
call k left. Each block waits for the same block of the other ranks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

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
        """Returns the number of programs for so many numbers."""
        return max(1, min(self.blocks, -(-num_numbers // self.size)))


def memory_bytes(max_bytes: int) -> int:
    """Returns how much memory a rank shares for messages of up to `max_bytes`."""
    return HEADER_BYTES + 4 * (max_bytes + _PADDING_BYTES)


def room_of_half(max_bytes: int, itemsize: int) -> int:
    """Returns how many numbers an input, or a result, has room for."""
    return (max_bytes + _PADDING_BYTES) // itemsize


@triton.jit
def numbers_at(address: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns a pointer to numbers whose place is known to allow loads of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


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
    ITSELF: tl.constexpr,
) -> None:
    """Writes `number` where each rank's block looks for this rank, and waits for theirs. ITSELF:
    among them for itself, which costs a fence."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if ITSELF or peer != RANK:
            flags = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
            place = flags + (half * SLOTS + RANK) * BLOCKS + block
            tl.atomic_xchg(place, number, sem="release", scope="sys")
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if ITSELF or peer != RANK:
            place = own + (half * SLOTS + peer) * BLOCKS + block
            while tl.atomic_add(place, 0, sem="acquire", scope="sys") - number < 0:
                pass
    tl.debug_barrier()


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
