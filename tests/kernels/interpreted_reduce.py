"""Ranks that exchange numbers over shared memory, each in a process of its own, in Triton's
interpreter:

    TRITON_INTERPRET=1 python tests/kernels/interpreted_reduce.py

Exit code 0: every rank got the sum in the order of ranks, and the others' rows, bit for bit, in
every call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from tandem_kernels.collectives.peer_exchange import (
    gathers,
    peer_gather,
    peer_scatter,
    scatters,
)
from tandem_kernels.collectives.peer_memory import (
    HEADER_BYTES,
    SEQUENCE,
    RankMemories,
    ReduceTuning,
    memory_bytes,
)
from tandem_kernels.collectives.peer_reduce import peer_reduce
from tandem_kernels.collectives.peer_reduce_norm import peer_reduce_norm, reduces_norm
from tandem_kernels.reference.elementwise import fused_add_rms_norm

MAX_BYTES = 1 << 16
REDUCING_RANKS = 3
EXCHANGING_RANKS = (2, 4)
"""Three ranks do both."""
CASES = [
    (5, torch.float32, False),
    (5, torch.float32, True),
    (5000, torch.float16, False),
    (9000, torch.float16, True),
    (8300, torch.float32, True),
    (2048, torch.float32, False),
]
"""Numbers, their type, and whether there are two shots: each call has blocks of its own."""
ROWS = [(1, 80), (66, 24)]
"""Rows and their width: more rows than blocks in the end."""
SMALL = ReduceTuning(blocks=3, size=2048, num_warps=1)
"""Few programs, which take several turns."""
EXCHANGES = [
    (3, (3, 1, 0, 2), 16, torch.float16),
    (1, (1, 1, 1, 1), 8, torch.float32),
    (130, (7, 130, 64, 1), 48, torch.float16),
]
"""Rows of the largest rank, of each, their width and type: the last take several programs."""
EPS = 1e-5
CALLS_BEFORE = 2**31 - 5
"""Calls already counted: their number outgrows 32 bits on the way, as after days."""


def summed(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def run(rank: int, memories: list[mmap.mmap]) -> bool:
    places = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    memory = RankMemories(torch.tensor(places), rank, MAX_BYTES)
    generators = [torch.Generator().manual_seed(i) for i in range(len(memories))]
    if len(memories) == REDUCING_RANKS and not reduces(memory, generators):
        return False
    return all(exchanges(memory, generators, *case) for case in EXCHANGES)


def reduces(memory: RankMemories, generators: list[torch.Generator]) -> bool:
    """Says whether all-reduces are right, with norms and without."""
    rank = memory.rank
    for size, dtype, two_shot in CASES + CASES[:3]:
        for tuning in (None, SMALL) if size > SMALL.size else (None,):
            parts = [torch.randn(size, generator=one).to(dtype) for one in generators]
            found = peer_reduce(parts[rank].clone(), memory, two_shot=two_shot, tuning=tuning)
            if not torch.equal(found, summed(parts)):
                print(f"rank {rank}: {tuning}, {size} numbers of {dtype}, two shots: {two_shot}")
                return False
    return all(norms(memory, generators, *shape) for shape in ROWS)


def exchanges(
    memory: RankMemories,
    generators: list[torch.Generator],
    num_rows: int,
    counts: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
) -> bool:
    """Says whether ranks with so many rows each find those of all, padded, and the sums of what all
    make of their own."""
    rank, ranks = memory.rank, memory.ranks
    rows = torch.zeros(ranks, num_rows, width, dtype=dtype)
    slots = torch.full((ranks, num_rows), -1)
    for peer, (count, generator) in enumerate(zip(counts, generators, strict=False)):
        rows[peer, :count] = torch.randn(count, width, generator=generator).to(dtype)
        slots[peer, :count] = torch.arange(count) + (peer << 40)
    count = counts[rank]
    own, own_slots = rows[rank, :count].clone(), slots[rank, :count].clone()
    parts = [torch.randn(ranks * num_rows, width, generator=one).to(dtype) for one in generators]
    if not (gathers(num_rows, width, dtype.itemsize, memory) and scatters(parts[rank], memory)):
        print(f"rank {rank}: {num_rows} x {width} is refused")
        return False
    found, found_slots = peer_gather(own, own_slots, num_rows, memory)
    scattered = peer_scatter(parts[rank], memory)
    is_right = (
        torch.equal(found, rows.flatten(0, 1))
        and torch.equal(found_slots, slots.flatten())
        and torch.equal(scattered, summed(parts).chunk(ranks)[rank])
    )
    if not is_right:
        print(f"rank {rank} of {ranks}: exchange of {num_rows} x {width}")
    return is_right


def norms(memory: RankMemories, generators: list[torch.Generator], rows: int, width: int) -> bool:
    """Says whether a sum with residual stream and norm is what these are one after the other."""
    parts = [torch.randn(rows, width, generator=one).half() for one in generators]
    shared = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, width + 8, generator=shared).half()
    weight = torch.rand(width, generator=shared) + 0.5
    normed, carried = fused_add_rms_norm(summed(parts), wide[:, :width].clone(), weight, EPS)
    residual, x = wide[:, :width], parts[memory.rank]
    if not reduces_norm(x, residual, memory):
        print(f"rank {memory.rank}: {rows} x {width} is refused")
        return False
    found = peer_reduce_norm(x, residual, weight, EPS, memory)
    torch.testing.assert_close(found, normed)
    return torch.equal(residual, carried)


def count_from(calls: int, memory: mmap.mmap) -> None:
    """Leaves memory as so many calls do: flags and sequence are numbers of 32 bits, which wrap."""
    header = torch.frombuffer(memory, dtype=torch.int32, count=HEADER_BYTES // 4)
    header[:SEQUENCE] = torch.tensor(2 * calls - 1).to(torch.int32)
    header[SEQUENCE] = torch.tensor(calls).to(torch.int32)


def let_others_run() -> None:
    """Makes a rank that looks whether another has told it something leave the processor to it:
    there may be fewer than ranks."""
    ask = interpreter.InterpreterBuilder.create_atomic_rmw

    def patiently(self: interpreter.InterpreterBuilder, *operands: Any) -> Any:
        time.sleep(1e-4)
        return ask(self, *operands)

    interpreter.InterpreterBuilder.create_atomic_rmw = patiently


def main() -> int:
    let_others_run()
    return max(play(ranks) for ranks in (REDUCING_RANKS, *EXCHANGING_RANKS))


def play(num_ranks: int) -> int:
    """Returns the greatest exit code of so many ranks."""
    memories = [mmap.mmap(-1, memory_bytes(MAX_BYTES)) for _ in range(num_ranks)]
    for memory in memories:
        count_from(CALLS_BEFORE, memory)
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os._exit(0 if run(rank, memories) else 1)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


if __name__ == "__main__":
    sys.exit(main())
