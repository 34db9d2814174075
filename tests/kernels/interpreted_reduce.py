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
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from interpreted_fixtures import remembering
from torch import Tensor
from triton.runtime import interpreter

from host.termination import die_with_parent
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
ROWS = [(1, 80), (66, 24), (133, 8)]
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
QUIET_CALLS = (1, 2**29, 3 * 2**29, 2**31 - 2)
"""Calls since a block was last told something: the numbers of half of them look larger."""
ENOUGH_LOOKS = 40
"""More than a rank needs to tell all others before it waits."""


def summed(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def run(rank: int, memory: RankMemories) -> bool:
    """Says whether all that this rank computes with the others is right."""
    generators = [torch.Generator().manual_seed(i) for i in range(memory.ranks)]
    if memory.ranks == REDUCING_RANKS and not reduces(memory, generators):
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
    return all(
        norms(memory, generators, *shape, two_shot=two_shot)
        for shape in ROWS
        for two_shot in (False, True)
    )


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


def norms(
    memory: RankMemories,
    generators: list[torch.Generator],
    rows: int,
    width: int,
    *,
    two_shot: bool,
) -> bool:
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
    found = peer_reduce_norm(x, residual, weight, EPS, memory, two_shot=two_shot)
    torch.testing.assert_close(found, normed)
    if not torch.equal(residual, carried):
        print(f"rank {memory.rank}: norms of {rows} x {width}, two shots: {two_shot}")
        return False
    return True


def count_from(calls: int, memory: mmap.mmap, quiet_calls: int) -> None:
    """Leaves memory as so many calls do, the last of which used few blocks: flags and sequence are
    numbers of 32 bits, which wrap."""
    header = torch.frombuffer(memory, dtype=torch.int32, count=HEADER_BYTES // 4)
    header[:SEQUENCE] = torch.tensor(2 * (calls - quiet_calls) - 1).to(torch.int32)
    header[SEQUENCE] = torch.tensor(calls).to(torch.int32)


class Looks:
    """Counts the looks of the ranks of a group at what others have told them."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def begin(self) -> None:
        self._page[0] = 0

    def look(self) -> None:
        """Leaves the processor to others: there may be fewer than ranks."""
        time.sleep(1e-4)
        self._page[0] = min(self._page[0] + 1, ENOUGH_LOOKS)

    def end(self) -> None:
        self._page[0] = ENOUGH_LOOKS

    def wait(self) -> None:
        """Waits until a rank has looked so often that it can have told all others, or has ended."""
        while self._page[0] < ENOUGH_LOOKS:
            time.sleep(1e-4)


def count_looks(looks: Looks) -> None:
    """Makes ranks of this process, and of its children, count them: only flags and the sequence are
    loaded as volatile."""
    ask = interpreter.InterpreterBuilder.create_load

    def counted(self: interpreter.InterpreterBuilder, *operands: Any) -> Any:
        if operands[-1]:
            looks.look()
        return ask(self, *operands)

    interpreter.InterpreterBuilder.create_load = counted


def waits_for_late(rank: int, memory: RankMemories, looks: Looks) -> bool:
    """Says whether ranks find their sum though all but the first begin late, and the block was
    last told something before numbers wrapped around to smaller ones."""
    parts = [torch.arange(8.0) * (peer + 1) for peer in range(memory.ranks)]
    if rank > 0:
        looks.wait()
    found = peer_reduce(parts[rank].clone(), memory, two_shot=False)
    looks.end()
    if not torch.equal(found, summed(parts)):
        print(f"rank {rank} went on with what nobody had written: {found}")
        return False
    return True


def main() -> int:
    looks = Looks()
    count_looks(looks)
    codes = [play(ranks, run) for ranks in (REDUCING_RANKS, *EXCHANGING_RANKS)]
    for calls in QUIET_CALLS:
        looks.begin()
        codes.append(play(2, partial(waits_for_late, looks=looks), quiet_calls=calls))
    return max(codes)


def play(num_ranks: int, part: Callable[[int, RankMemories], bool], quiet_calls: int = 0) -> int:
    """Returns the greatest exit code of so many ranks, each of which plays its part. They end with
    this process, and when one has failed: it may be what the others wait for."""
    memories = [mmap.mmap(-1, memory_bytes(MAX_BYTES)) for _ in range(num_ranks)]
    for memory in memories:
        count_from(CALLS_BEFORE, memory, quiet_calls)
    children, parent = set[int](), os.getpid()
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            places = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in memories]
            memory_of_ranks = RankMemories(torch.tensor(places), rank, MAX_BYTES)
            os._exit(0 if part(rank, memory_of_ranks) else 1)
        children.add(child)
    codes = []
    while children:
        child, status = os.wait()
        children.remove(child)
        codes.append(abs(os.waitstatus_to_exitcode(status)))
        for other in children if codes[-1] else ():
            os.kill(other, signal.SIGKILL)
    return max(codes)


if __name__ == "__main__":
    with remembering():
        code = main()
    sys.exit(code)
