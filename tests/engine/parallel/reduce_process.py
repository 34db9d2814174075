"""One of several ranks that add up, and exchange rows, over each other's GPU memory:

    python -m tests.engine.parallel.reduce_process RANK SIZE RENDEZVOUS

Ranks may share one GPU. Prints "equal" when every call, eager and replayed, gave the sum in the
order of ranks, bit for bit, and every gather the rows of all.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from engine.parallel.distributed import meet
from engine.parallel.mapped_memory import MappedMemory
from engine.parallel.peer_exchanger import PeerExchanger, room_for
from engine.parallel.peer_reducer import PeerReducer
from tandem_kernels.reference.elementwise import fused_add_rms_norm

ROWS = ((1, 4096), (5, 2880), (256, 4096))
MAX_BYTES = 16 << 20
EXCHANGED = ((1, 2048), (3, 2880), (130, 2048), (2048, 2048))
"""Rows of the largest rank and their width."""
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


def check_norm(
    reducer: PeerReducer, rank: int, size: int, rows: int, width: int, *, two_shot: bool
) -> None:
    """Sum, residual stream and norm in one launch are what they are one after the other, in a
    graph, too."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    weight = torch.linspace(0.5, 2.0, width, device=device).bfloat16()
    parts = [part.view(rows, width) for part in inputs(rows * width, size, rows, device)]
    carried = inputs(rows * width, 1, rows + 1, device)[0].view(rows, width)
    x, residual = parts[rank].clone(), carried.clone()
    reduce_norm = partial(reducer.reduce_norm_at_once, two_shot=two_shot)
    found = reduce_norm(x, residual, weight, 1e-5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = reduce_norm(x, residual, weight, 1e-5)
    for normed in (found, again):
        expected, carried = fused_add_rms_norm(summed(parts), carried, weight, 1e-5)
        assert normed is not None and torch.equal(residual, carried)
        torch.testing.assert_close(normed, expected)
        graph.replay()


def check_exchange(exchanger: PeerExchanger, rank: int, size: int, most: int, width: int) -> None:
    """Ranks with fewer rows than `most`, the last with none, find those of all, and the sums of
    what all make of theirs; replayed, with what the same place then holds, too."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    counts = [most * (size - 1 - peer) // (size - 1) for peer in range(size)]
    own = torch.empty(counts[rank], width, dtype=torch.bfloat16, device=device)
    slots = torch.arange(counts[rank], device=device) + (rank << 40)
    wide = torch.empty(size * most, width, dtype=torch.bfloat16, device=device)

    def exchange() -> tuple[Tensor, Tensor, Tensor]:
        gathered, own_sums = exchanger.gather(own, slots, most), exchanger.sum_own_rows(wide)
        assert gathered is not None and own_sums is not None, "there is room"
        return *gathered, own_sums

    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = exchange()
    for turn in range(4):
        rows = torch.zeros(size, most, width, dtype=torch.bfloat16, device=device)
        all_slots = torch.full((size, most), -1, device=device)
        for peer, part in enumerate(inputs(most * width, size, turn, device)):
            rows[peer, : counts[peer]] = part.view(most, width)[: counts[peer]]
            all_slots[peer, : counts[peer]] = torch.arange(counts[peer], device=device)
            all_slots[peer, : counts[peer]] += peer << 40
        parts = inputs(wide.numel(), size, 100 + turn, device)
        own.copy_(rows[rank, : counts[rank]])
        wide.copy_(parts[rank].view_as(wide))
        if turn % 2:
            graph.replay()
            found = recorded
        else:
            found = exchange()
        assert torch.equal(found[0], rows.flatten(0, 1))
        assert torch.equal(found[1], all_slots.flatten())
        assert torch.equal(found[2], summed(parts).view_as(wide).chunk(size)[rank])


def main(rank: int, size: int, rendezvous: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = meet(rank, size, rendezvous, timedelta(seconds=60))
    memory = MappedMemory.connect(store, rank, size, device, MAX_BYTES, "all-reduce")
    assert memory is not None, "ranks of one host map each other's memory"
    reducer = PeerReducer(memory)
    for seed, count in enumerate(SIZES):
        for two_shot in (False, True):
            reduce = partial(reducer.reduce_by, two_shot=two_shot)
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
    for (rows, width), two_shot in itertools.product(ROWS, (False, True)):
        check_norm(reducer, rank, size, rows, width, two_shot=two_shot)
    room = room_for(size, *EXCHANGED[-1]) * 2
    memory = MappedMemory.connect(store, rank, size, device, room, "exchange of tokens")
    assert memory is not None, "ranks of one host map each other's memory"
    exchanger = PeerExchanger(memory)
    for rows, width in EXCHANGED:
        check_exchange(exchanger, rank, size, rows, width)
    store.set(f"done {rank}", "yes")
    for peer in range(size):
        store.get(f"done {peer}")
    reducer.close()
    exchanger.close()
    print("equal", flush=True)
    for peer in range(size):
        store.set(f"closed {rank}", "yes")
        store.get(f"closed {peer}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
