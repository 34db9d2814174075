"""One rank of the scenes that `test_distributed` plays:

    python -m tests.engine.models.collective_rank SCENE OUT RANK SIZE RENDEZVOUS

Writes what the scene returns to OUT/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engine.distributed import TensorParallelGroup


def main(scene: str, out: str, rank: str, size: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    group = TensorParallelGroup(int(rank), int(size), "cpu", rendezvous, timeout_s=60)
    scenes = {"collectives": collectives, "dead_peer": dead_peer}
    results = scenes[scene](group)
    (Path(out) / f"{rank}.json").write_text(json.dumps(results))


def collectives(group: TensorParallelGroup) -> dict[str, Any]:
    own = float(group.rank)
    noise = torch.randn(7, 33, generator=torch.Generator().manual_seed(group.rank))
    strided = torch.arange(6.0).view(2, 3).t()
    results = {
        "half": group.all_reduce(torch.full((3, 5), own + 1, dtype=torch.bfloat16)).tolist(),
        "strided": group.all_reduce(strided * own).tolist(),
        "noise": group.all_reduce(noise).tolist(),
        "gathered": group.all_gather(torch.tensor([[own, -own], [0.5, own]])).tolist(),
        "gathered_strided": group.all_gather(strided + own).tolist(),
        "empty": group.all_gather(torch.empty(0, 4)).shape,
        "listening": listening_addresses(),
    }
    for _ in range(20):
        noise = group.all_reduce(noise * 0.5)
    results["many"] = noise.tolist()
    group.close()
    return results


def dead_peer(group: TensorParallelGroup) -> str:
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


def listening_addresses() -> list[str]:
    """Local addresses, hexadecimal, on which this process listens for TCP."""
    inodes = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and link.readlink().name.startswith("socket:")
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    is_listening = "0A"
    return sorted({r[1].split(":")[0] for r in rows if r[3] == is_listening and r[9] in inodes})


if __name__ == "__main__":
    main(*sys.argv[1:])
