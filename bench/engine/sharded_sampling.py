"""Times draws of ranks that have a part of the vocabulary each: behind a gather of all logits, and
by an exchange of the best token of each part.

    python -m bench.engine.sharded_sampling --ranks 2                 # one GPU a rank
    python -m bench.engine.sharded_sampling --ranks 2 --device cpu    # processes, over gloo
    python -m bench.engine.sharded_sampling --ranks 2 --vocabulary 151936

Milliseconds, the mean over ranks of medians, from the logits that a rank's GEMM leaves to the
tokens. A GPU's launches are counted in, as in steps whose sampling no graph holds. The ratio says
how many times as long the gather takes. Results: bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.engine.ranks.processes import require_gpus, run_ranks
from bench.record import write_result
from cli.cluster import free_ports
from engine.layers.vocab_part import VocabCut, VocabPart
from engine.parallel.distributed import ParallelGroup
from tandem_kernels import ops

_UNIT = 64
_CALLS = {"cpu": 7, "cuda": 50}
_WARM_UPS = 3


def part_of(
    group: ParallelGroup, vocab_size: int, num_rows: int, device: torch.device
) -> VocabPart:
    """Returns this rank's part of random logits."""
    unit = _UNIT * group.size
    width = -(-vocab_size // unit) * _UNIT
    start = group.rank * width
    logits = 4 * torch.randn(num_rows, width, device=device)
    return VocabPart(
        logits, VocabCut(group, start, width, min(width, vocab_size - start), vocab_size)
    )


class Ways:
    """Draws from the logits of a step, by both ways."""

    def __init__(self, part: VocabPart) -> None:
        num_rows, device = part.padded.shape[0], part.padded.device
        self._part = part
        self._temperature = torch.ones(num_rows, device=device)
        self._zeros = torch.zeros(num_rows, device=device)
        self._seeds = torch.arange(num_rows, device=device)

    def gathered(self) -> Tensor:
        none, ones = self._zeros.int(), self._temperature
        keys = self._seeds, self._seeds
        logits = self._part.whole()
        return ops.sample(logits, ones, none, ones, self._zeros, *keys, has_filters=False)

    def in_parts(self) -> Tensor:
        return self._part.best(self._temperature, self._seeds, self._seeds)


def milliseconds(group: ParallelGroup, call: Callable[[], object], device: torch.device) -> float:
    """Returns the mean over ranks of medians, which all measure at once."""
    times = []
    for index in range(_WARM_UPS + _CALLS[device.type]):
        group.all_reduce(torch.zeros(1, device=device))  # Ranks begin together.
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        if index >= _WARM_UPS:
            times.append(1e3 * (time.perf_counter() - began))
    own = torch.tensor([statistics.median(times)], device=device)
    return float(group.all_gather(own).mean())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    group: ParallelGroup, arguments: argparse.Namespace, device: torch.device
) -> list[dict[str, object]]:
    """Times both ways of everything, and prints a line of each."""
    found: list[dict[str, object]] = []
    for num_rows in arguments.rows:
        part = part_of(group, arguments.vocabulary, num_rows, device)
        ways = Ways(part)
        gathered = milliseconds(group, ways.gathered, device)
        sharded = milliseconds(group, ways.in_parts, device)
        row = {
            "rows": num_rows,
            "gathered_ms": round(gathered, 4),
            "sharded_ms": round(sharded, 4),
            "ratio": round(gathered / sharded, 2),
            # What a rank gives to each other one: all its logits, or (noisy logit, token).
            "gathered_bytes": 4 * part.padded.numel(),
            "sharded_bytes": 2 * 4 * num_rows,
        }
        found.append(row)
        if group.rank == 0:
            print(
                f"{num_rows:4} rows {gathered:9.3f} ms gathered, {sharded:9.3f} in parts: "
                f"{gathered / sharded:6.2f} x; "
                f"{row['gathered_bytes']:10} and {row['sharded_bytes']:7} bytes",
                flush=True,
            )
    return found


def run_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Measures in one rank; the first one writes."""
    is_cuda = arguments.device == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    with ParallelGroup(rank, arguments.ranks, device, rendezvous) as group, torch.inference_mode():
        result = {
            "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
            "torch": torch.__version__,
            "ranks": arguments.ranks,
            "vocabulary": arguments.vocabulary,
            "times": measure(group, arguments, device),
        }
        if rank == 0:
            print(write_result(arguments.name, result), flush=True)
        _wait(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rows", default="1,16,64,256", help="of a step, with commas between")
    parser.add_argument("--name", default="sharded_sampling", help="of the result file")
    arguments = parser.parse_args()
    arguments.rows = [int(rows) for rows in arguments.rows.split(",")]
    if arguments.device == "cuda":
        require_gpus(arguments.ranks)
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    sys.exit(run_ranks(arguments.ranks, run_rank, arguments, rendezvous))


if __name__ == "__main__":
    main()
