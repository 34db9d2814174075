"""Ranks of a group as threads of one process, and what `test_distributed` has them play."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.layers.shard import Shard
from engine.layers.vocabulary.embedding import LMHead
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops
from tests.engine.models.conftest import free_ports

T = TypeVar("T")
CPU = torch.device("cpu")
_TIMEOUT_S = 60


def play(scene: Callable[[ParallelGroup], T], size: int, *, fixed_order: bool = False) -> list[T]:
    """Returns what each rank returned."""
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"

    def rank_of(rank: int) -> T:
        group = ParallelGroup(
            rank, size, "cpu", rendezvous, timeout_s=_TIMEOUT_S, fixed_order=fixed_order
        )
        return scene(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_of, range(size), timeout=_TIMEOUT_S))


def collectives(group: ParallelGroup) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (results, sockets of the process that listen)."""
    own = float(group.rank)
    noise = torch.randn(7, 33, generator=torch.Generator().manual_seed(group.rank))
    strided = torch.arange(6.0).view(2, 3).t()
    results = {
        "half": group.all_reduce(torch.full((3, 5), own + 1, dtype=torch.bfloat16)).tolist(),
        "strided": group.all_reduce(strided * own).tolist(),
        "noise": group.all_reduce(noise).tolist(),
        "gathered": group.all_gather(torch.tensor([[own, -own], [0.5, own]])).tolist(),
        "gathered_strided": group.all_gather(strided + own).tolist(),
        "empty": list(group.all_gather(torch.empty(0, 4)).shape),
    }
    sockets = listening()
    for _ in range(20):
        noise = group.all_reduce(noise * 0.5)
    results["many"] = noise.tolist()
    group.close()
    return results, sockets


def sum_of_rows(group: ParallelGroup) -> list[bool]:
    """Says of steps of several sizes whether each row has the bits that it has alone, which are
    those of adding in the order of ranks in float32 and rounding once."""
    parts = [
        torch.randn(37, 19, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for rank in range(group.size)
    ]
    wide = parts[0].float()
    for part in parts[1:]:
        wide += part.float()
    expected = wide.to(parts[0].dtype)
    own = parts[group.rank]
    found = [
        torch.equal(group.all_reduce(own[first:end].clone()), expected[first:end])
        for first, end in ((0, 1), (36, 37), (3, 20), (0, 37))
    ]
    group.close()
    return found


def draws_of_parts(group: ParallelGroup) -> list[bool]:
    """Says of vocabularies, the last of which leaves a rank without tokens, whether ranks that draw
    each from its part choose what is drawn from whole rows; False: the head does not split it."""
    found = []
    for vocab_size in (150, 100, 60):
        head = LMHead(vocab_size, 16, Shard(ParallelPlace(range(1), group), torch.float32, CPU))
        generator = torch.Generator().manual_seed(vocab_size + group.rank)
        head.weight[: head.num_filled].normal_(generator=generator)
        hidden = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
        temperature = torch.tensor([0.0, 0.3, 1.0] * 4)
        seeds, positions = torch.arange(12) - 5, torch.arange(12) * 1000
        no_k, ones = torch.zeros(12, dtype=torch.int32), torch.ones(12)
        whole = ops.sample(head(hidden), temperature, no_k, ones, 0 * ones, seeds, positions)
        if head.may_stay_split:
            drawn = head.part(hidden).best(temperature, seeds, positions)
        found.append(head.may_stay_split and torch.equal(drawn, whole))
    group.close()
    return found


def dead_peer(group: ParallelGroup) -> str:
    """Rank 1 leaves; rank 0 is told instead of waiting for ever."""
    group.all_reduce(torch.ones(3))
    if group.rank == 1:
        group.close()
        return "left"
    try:
        while True:
            group.all_reduce(torch.ones(3))
    except RuntimeError:
        return "noticed"


def listening() -> dict[str, str]:
    """Returns this process' sockets that listen for TCP: inode to local address, hexadecimal."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue  # Another thread has closed it.
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    is_listening = "0A"
    return {r[9]: r[1].split(":")[0] for r in rows if r[3] == is_listening and r[9] in inodes}
