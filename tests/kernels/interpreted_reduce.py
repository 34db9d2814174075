"""Ranks that add up over shared memory, each in a process of its own, in Triton's interpreter:

    TRITON_INTERPRET=1 python tests/kernels/interpreted_reduce.py RANKS

Exit code 0: every rank got the sum in the order of ranks, bit for bit, in every call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from tandem_kernels.collectives.peer_memory import ReduceTuning, memory_bytes
from tandem_kernels.collectives.peer_push import peer_push
from tandem_kernels.collectives.peer_reduce import peer_reduce
from tandem_kernels.collectives.peer_reduce_norm import peer_reduce_norm, reduces_norm
from tandem_kernels.reference.elementwise import fused_add_rms_norm

MAX_BYTES = 1 << 16
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
EPS = 1e-5


def summed(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def run(rank: int, memories: list[mmap.mmap]) -> bool:
    places = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    addresses = torch.tensor(places)
    generators = [torch.Generator().manual_seed(i) for i in range(len(memories))]
    for size, dtype, two_shot in CASES + CASES[:3]:
        ways = [peer_reduce, peer_push]
        if size > SMALL.size:
            ways.append(partial(peer_push, tuning=SMALL))
        for way in ways:
            parts = [torch.randn(size, generator=one).to(dtype) for one in generators]
            found = way(parts[rank].clone(), addresses, rank, MAX_BYTES, two_shot=two_shot)
            if not torch.equal(found, summed(parts)):
                print(f"rank {rank}: {way}, {size} numbers of {dtype}, two shots: {two_shot}")
                return False
    return all(norms(rank, addresses, generators, *shape) for shape in ROWS)


def norms(
    rank: int, addresses: Tensor, generators: list[torch.Generator], rows: int, width: int
) -> bool:
    """Says whether a sum with residual stream and norm is what these are one after the other."""
    parts = [torch.randn(rows, width, generator=one).half() for one in generators]
    shared = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, width + 8, generator=shared).half()
    weight = torch.rand(width, generator=shared) + 0.5
    normed, carried = fused_add_rms_norm(summed(parts), wide[:, :width].clone(), weight, EPS)
    residual, x = wide[:, :width], parts[rank]
    if not reduces_norm(x, residual, len(addresses), MAX_BYTES):
        print(f"rank {rank}: {rows} x {width} is refused")
        return False
    found = peer_reduce_norm(x, residual, weight, EPS, addresses, rank, MAX_BYTES)
    torch.testing.assert_close(found, normed)
    return torch.equal(residual, carried)


def let_others_run() -> None:
    """Makes a rank that looks whether another has told it something leave the processor to it:
    there may be fewer than ranks."""
    ask = interpreter.InterpreterBuilder.create_atomic_rmw

    def patiently(self: interpreter.InterpreterBuilder, *operands: Any) -> Any:
        time.sleep(1e-4)
        return ask(self, *operands)

    interpreter.InterpreterBuilder.create_atomic_rmw = patiently


def main(num_ranks: int) -> int:
    let_others_run()
    memories = [mmap.mmap(-1, memory_bytes(MAX_BYTES)) for _ in range(num_ranks)]
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os._exit(0 if run(rank, memories) else 1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
