"""All-reduce of small messages: over memory that ranks share, in one shot and in two, and by NCCL.

    python -m bench.engine.all_reduce --ranks 2 --out bench/results/all-reduce.json
    python -m bench.engine.all_reduce --ranks 2 --plan auto+push     # see the setting
    python -m bench.engine.all_reduce --ranks 2 --tune               # how messages are shared out
    python -m bench.engine.all_reduce --ranks 2 --norm               # with residual stream and norm

One process and one GPU a rank; each time is of a call inside a CUDA graph, the mean over ranks.
`--tune` prints the quickest of each way by size; a star marks what is taken by default.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cli.cluster import free_ports
from engine.distributed import ParallelGroup
from engine.peer_reducer import PeerReducer, ReducePlan, microseconds_in_graph
from tandem_kernels.collectives.peer_memory import ReduceTuning
from tandem_kernels.collectives.peer_push import push_tuning
from tandem_kernels.collectives.peer_reduce import TUNING
from tandem_kernels.elementwise.rms_norm import fused_add_rms_norm

SIZES = (8 << 10, 128 << 10, 512 << 10, 2 << 20)
"""Bytes of a message: 1, 16, 64 and 256 rows of 4096 numbers in half precision."""
HIDDEN = 4096
_SHAPES = ((1024, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16), (16384, 16))
"""Numbers that a program has in flight, and its warps."""
_BLOCKS = (8, 16, 32, 64, 128)
_SHOWN = 4


def mean_us(group: ParallelGroup, call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Returns the mean over ranks, which all measure at once."""
    own = torch.tensor([microseconds_in_graph(call, x)], device=x.device)
    return float(group.all_gather(own).mean())


def tune(group: ParallelGroup, reducer: PeerReducer, dtype: torch.dtype) -> list[dict[str, object]]:
    """Times all ways to share messages out, and prints the quickest of each size."""
    found: list[dict[str, object]] = []
    for size, pushes, two_shot in itertools.product(SIZES, (False, True), (False, True)):
        count = size // dtype.itemsize
        x = torch.zeros(count, dtype=dtype, device=torch.device("cuda", group.rank))
        usual = push_tuning(count // group.size if two_shot else count) if pushes else TUNING
        shapes = (ReduceTuning(blocks, *shape) for blocks in _BLOCKS for shape in _SHAPES)
        timed = []
        for tuning in dict.fromkeys((usual, *shapes)):
            call = partial(reducer.reduce_by, two_shot=two_shot, pushes=pushes, tuning=tuning)
            timed.append((mean_us(group, call, x), tuning))
        timed.sort(key=lambda item: item[0])
        way = f"{'push' if pushes else 'pull'}, {'two' if two_shot else 'one'} shot"
        for us, tuning in timed if group.rank == 0 else ():
            if tuning == usual or us <= timed[_SHOWN - 1][0]:
                print(f"{size:8} {way} {us:6.1f} {'*' if tuning == usual else ' '} {tuning}")
        found.append({"bytes": size, "way": way, "us": timed[0][0], "tuning": repr(timed[0][1])})
    return found


def time_norms(
    group: ParallelGroup, reducer: PeerReducer, dtype: torch.dtype
) -> list[dict[str, object]]:
    """Times sum, residual stream and norm in one launch, and in two."""
    device = torch.device("cuda", group.rank)
    weight = torch.ones(HIDDEN, dtype=dtype, device=device)
    found: list[dict[str, object]] = []
    for size in SIZES:
        x = torch.zeros(size // dtype.itemsize // HIDDEN, HIDDEN, dtype=dtype, device=device)
        residual = torch.zeros_like(x)

        def one(x: Tensor, residual: Tensor = residual) -> Tensor:
            normed = reducer.reduce_norm(x, residual, weight, 1e-5)
            assert normed is not None, "messages of this size fit"
            return normed

        def two(x: Tensor, residual: Tensor = residual) -> Tensor:
            summed = reducer.reduce(x)
            summed = group.all_reduce(x) if summed is None else summed
            return fused_add_rms_norm(summed, residual, weight, 1e-5)[0]

        both = {"one launch": mean_us(group, one, x), "two": mean_us(group, two, x)}
        found.append({"bytes": size, **both})
        if group.rank == 0:
            print(found[-1])
    return found


def run_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Measures in one rank; the first one writes."""
    device, dtype = torch.device("cuda", rank), getattr(torch, arguments.dtype)
    torch.cuda.set_device(device)
    with ParallelGroup(rank, arguments.ranks, device, rendezvous) as group:
        group.share_memory(dtype, ReducePlan.parse(arguments.plan))
        reducer = group.reducer
        if reducer is None:
            sys.exit("ranks do not share memory")
        result = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "ranks": arguments.ranks,
            "dtype": arguments.dtype,
            "plan": arguments.plan,
            "chosen": str(reducer.limits),
            "microseconds": {
                size: dict(zip(("one_shot", "two_shot", "nccl"), times, strict=True))
                for size, times in reducer.times.items()
            },
        }
        if arguments.tune:
            result["tuned"] = tune(group, reducer, dtype)
        if arguments.norm:
            result["norms"] = time_norms(group, reducer, dtype)
        if rank == 0:
            text = json.dumps(result, indent=1)
            print(text, flush=True)
            if arguments.out is not None:
                arguments.out.write_text(text + "\n")
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plan", default="auto", help="as --all-reduce, but not nccl")
    parser.add_argument("--tune", action="store_true", help="time all ways to share messages out")
    parser.add_argument("--norm", action="store_true", help="time sums with their norms")
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
