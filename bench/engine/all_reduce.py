"""All-reduce of small messages: over memory that ranks share, in one shot and in two, and by NCCL.

    python -m bench.engine.all_reduce --ranks 2 --out bench/results/all-reduce.json

One process and one GPU a rank; each time is of a call inside a CUDA graph, the mean over ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

import torch

from cli.cluster import free_ports
from engine.distributed import ParallelGroup


def run_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Measures in one rank; the first one writes."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with ParallelGroup(rank, arguments.ranks, device, rendezvous) as group:
        group.share_memory(getattr(torch, arguments.dtype), None)
        reducer = group.reducer
        if rank == 0 and reducer is not None:
            result = {
                "device": torch.cuda.get_device_name(device),
                "torch": torch.__version__,
                "ranks": arguments.ranks,
                "dtype": arguments.dtype,
                "chosen": str(reducer.limits),
                "microseconds": {
                    size: dict(zip(("one_shot", "two_shot", "nccl"), times, strict=True))
                    for size, times in reducer.times.items()
                },
            }
            text = json.dumps(result, indent=1)
            print(text, flush=True)
            if arguments.out is not None:
                arguments.out.write_text(text + "\n")
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"{arguments.ranks} GPUs are needed, and {torch.cuda.device_count()} are here")
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, arguments, rendezvous))
        for rank in range(arguments.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in ranks))


if __name__ == "__main__":
    main()
