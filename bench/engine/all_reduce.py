"""All-reduce of small messages: over memory that ranks share, in one shot and in two, and by NCCL;
or the all-gather and reduce-scatter of data-parallel groups.

    python -m bench.engine.all_reduce --ranks 2
    python -m bench.engine.all_reduce --ranks 2 --tune               # how messages are shared out
    python -m bench.engine.all_reduce --ranks 2 --exchange [--tune]  # of rows between groups

One process and one GPU a rank; each time is of a call inside a CUDA graph, the mean over ranks.
`--tune` prints the quickest of each way by size; a star marks what is taken by default. Results:
bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing import spawn

from bench.arguments import parser_of
from bench.record import write_result
from cli.local_cluster.cluster import free_ports
from engine.parallel.distributed import ParallelGroup
from engine.parallel.mapped_memory import MAX_BYTES
from engine.parallel.peer_exchanger import ExchangeLimits, PeerExchanger
from engine.parallel.peer_reducer import PeerReducer
from engine.parallel.peer_timing import microseconds_in_graph
from tandem_kernels.collectives.peer_memory import ReduceTuning
from tandem_kernels.collectives.peer_reduce import reduce_tuning

SIZES = (8 << 10, 128 << 10, 512 << 10, 2 << 20, 16 << 20, 64 << 20)
"""Bytes of a message: 1, 16, 64, 256, 2048 and 8192 rows of 4096 numbers in half precision."""
HIDDEN = 4096
ROWS = (1, 16, 128, 1024, 8192)
"""Rows of a rank that groups exchange, `--hidden` wide."""
TUNINGS = [
    ReduceTuning(blocks, numbers, warps)
    for blocks in (8, 16, 32, 64, 128)
    for numbers, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16), (16384, 16))
]
_SHOWN = 4


def mean_us(group: ParallelGroup, call: Callable[[Tensor], object], x: Tensor) -> float:
    """Returns the mean over ranks, which all measure at once."""
    own = torch.tensor([microseconds_in_graph(call, x)], device=x.device)
    return float(group.all_gather(own).mean())


def tuned_us(
    group: ParallelGroup, call: Callable[..., object], x: Tensor, tunings: Sequence[ReduceTuning]
) -> list[tuple[float, ReduceTuning]]:
    """Returns the time of each way to share work out, the quickest first."""
    found = [(mean_us(group, partial(call, tuning=one), x), one) for one in dict.fromkeys(tunings)]
    return sorted(found, key=lambda item: item[0])


def tune(
    group: ParallelGroup, reducer: PeerReducer, dtype: torch.dtype, sizes: Sequence[int]
) -> list[dict[str, object]]:
    """Times all ways to share messages out, and prints the quickest of each size."""
    found: list[dict[str, object]] = []
    for size, two_shot in itertools.product(sizes, (False, True)):
        count = size // dtype.itemsize
        x = torch.zeros(count, dtype=dtype, device=torch.device("cuda", group.rank))
        usual = reduce_tuning(count // group.size if two_shot else count)
        call = partial(reducer.reduce_by, two_shot=two_shot)
        timed = tuned_us(group, call, x, [usual, *TUNINGS])
        way = f"{'two' if two_shot else 'one'} shot"
        for us, tuning in timed if group.rank == 0 else ():
            if tuning == usual or us <= timed[_SHOWN - 1][0]:
                print(f"{size:8} {way} {us:6.1f} {'*' if tuning == usual else ' '} {tuning}")
        found.append({"bytes": size, "way": way, "us": timed[0][0], "tuning": repr(timed[0][1])})
    return found


def tune_exchange(
    group: ParallelGroup, exchanger: PeerExchanger, dtype: torch.dtype, hidden: int
) -> list[dict[str, object]]:
    """Times all ways to share rows out between programs, and prints the quickest of each number."""
    found: list[dict[str, object]] = []
    exchanger.limits = ExchangeLimits(MAX_BYTES, MAX_BYTES)
    for rows in ROWS:
        x = torch.zeros(rows, hidden, dtype=dtype, device=torch.device("cuda", group.rank))
        slots, wide = torch.arange(rows, device=x.device), x.repeat(group.size, 1)
        if exchanger.gather(x, slots, rows) is None or exchanger.sum_own_rows(wide) is None:
            break
        ways = {
            "gather": (partial(exchanger.gather, slot_mapping=slots, num_rows=rows), x),
            "scatter": (exchanger.sum_own_rows, wide),
        }
        for way, (call, given) in ways.items():
            usual = mean_us(group, call, given)
            for us, tuning in tuned_us(group, call, given, TUNINGS)[:_SHOWN]:
                if group.rank == 0:
                    print(f"{rows:6} rows {way:8} {us:6.1f} of {usual:6.1f} {tuning}")
                found.append({"rows": rows, "way": way, "us": us, "tuning": repr(tuning)})
    return found


def measure_reduce(group: ParallelGroup, arguments: argparse.Namespace) -> dict[str, object]:
    """Returns what the start of a node finds of all-reduces."""
    dtype = getattr(torch, arguments.dtype)
    sizes: list[int] = arguments.sizes
    group.share_memory(dtype, HIDDEN, max(*SIZES, *sizes) // HIDDEN // dtype.itemsize)
    reducer = group.reducer
    if reducer is None:
        sys.exit("ranks do not share memory")
    result: dict[str, object] = {
        "chosen": str(reducer.limits),
        "microseconds": {size: asdict(times) for size, times in reducer.times.items()},
    }
    return result | ({"tuned": tune(group, reducer, dtype, sizes)} if arguments.tune else {})


def measure_exchange(group: ParallelGroup, arguments: argparse.Namespace) -> dict[str, object]:
    """Returns what the start of a node finds of the exchange of rows."""
    dtype = getattr(torch, arguments.dtype)
    group.exchange_by_writes(dtype, arguments.hidden, ROWS[-1])
    exchanger = group.exchanger
    if exchanger is None:
        sys.exit("ranks do not share memory")
    result: dict[str, object] = {
        "hidden": arguments.hidden,
        "chosen": str(exchanger.limits),
        "microseconds": {size: asdict(times) for size, times in exchanger.times.items()},
    }
    if arguments.tune:
        result["tuned"] = tune_exchange(group, exchanger, dtype, arguments.hidden)
    return result


def run_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Measures in one rank; the first one writes."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    measure = measure_exchange if arguments.exchange else measure_reduce
    with ParallelGroup(rank, arguments.ranks, device, rendezvous) as group:
        result = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "ranks": arguments.ranks,
            "dtype": arguments.dtype,
            **measure(group, arguments),
        }
        if rank == 0:
            print(json.dumps(result, indent=1))
            name = arguments.name or ("token_exchange" if arguments.exchange else "all_reduce")
            print(write_result(name, result), flush=True)
        torch.cuda.synchronize(device)


def main() -> None:
    parser = parser_of(__doc__, "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="time all ways to share messages out")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, to tune for")
    parser.add_argument("--exchange", action="store_true", help="of rows between groups")
    parser.add_argument("--hidden", type=int, default=2048, help="width of these rows")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"{arguments.ranks} GPUs are needed, and {torch.cuda.device_count()} are here")
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    spawn(run_rank, (arguments, rendezvous), arguments.ranks)


if __name__ == "__main__":
    main()
