"""One of several ranks that add up over each other's GPU memory:

    python -m tests.engine.models.reduce_process RANK SIZE RENDEZVOUS

Ranks may share one GPU. Prints "equal" when every call, eager and replayed, gave the sum in the
order of ranks, bit for bit.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from engine.distributed import meet
from engine.peer_reducer import MAX_BYTES, PeerReducer
from tandem_kernels.reference.elementwise import fused_add_rms_norm

ROWS = ((1, 4096), (5, 2880), (256, 4096))
SIZES = (1, 77, 4096, 65536, MAX_BYTES // 2)


def inputs(size: int, num_ranks: int, seed: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(num_ranks)
    ]


def summed(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def check_norm(reducer: PeerReducer, rank: int, size: int, rows: int, width: int) -> None:
    """Sum, residual stream and norm in one launch are what they are one after the other, in a
    graph, too."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    weight = torch.linspace(0.5, 2.0, width, device=device).bfloat16()
    parts = [part.view(rows, width) for part in inputs(rows * width, size, rows, device)]
    carried = inputs(rows * width, 1, rows + 1, device)[0].view(rows, width)
    x, residual = parts[rank].clone(), carried.clone()
    found = reducer.reduce_norm(x, residual, weight, 1e-5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = reducer.reduce_norm(x, residual, weight, 1e-5)
    for normed in (found, again):
        expected, carried = fused_add_rms_norm(summed(parts), carried, weight, 1e-5)
        assert normed is not None and torch.equal(residual, carried)
        torch.testing.assert_close(normed, expected)
        graph.replay()


def main(rank: int, size: int, rendezvous: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = meet(rank, size, rendezvous, timedelta(seconds=60))
    reducer = PeerReducer.connect(store, rank, size, device)
    assert reducer is not None, "ranks of one host map each other's memory"
    for seed, count in enumerate(SIZES):
        for two_shot, pushes in itertools.product((False, True), (False, True)):
            reduce = partial(reducer.reduce_by, two_shot=two_shot, pushes=pushes)
            parts = inputs(count, size, seed, device)
            assert torch.equal(reduce(parts[rank]), summed(parts))
            # A graph: its second call takes what the first has given.
            x = parts[rank].clone()
            reduce(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                first = reduce(x)
                second = reduce(first)
            for turn in range(5):
                others = inputs(count, size, 100 + turn, device)
                x.copy_(others[rank])
                graph.replay()
                once = summed(others)
                assert torch.equal(first, once)
                assert torch.equal(second, summed([once] * size))
    for rows, width in ROWS:
        check_norm(reducer, rank, size, rows, width)
    store.set(f"done {rank}", "yes")
    for peer in range(size):
        store.get(f"done {peer}")
    reducer.close()
    print("equal", flush=True)
    for peer in range(size):
        store.set(f"closed {rank}", "yes")
        store.get(f"closed {peer}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
