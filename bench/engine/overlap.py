#!/usr/bin/env python3
"""Prefill by tensor-parallel ranks: what all-reduces cost, and what computing beside them gains.

    python -m bench.engine.overlap                        # 8B shape, two GPUs
    python -m bench.engine.overlap --ctas 0,8 --rounds 3  # how many SMs NCCL may take
    python -m bench.engine.overlap --tiny                 # two ranks on the CPU, over gloo

The engine's own layers run as one CUDA graph, without engine and sampling:

    serial      a GEMM, the sum over ranks of its whole output, the norm: what the engine does
    no sums     the same without sums: what is left of the time if all of them are hidden
    apart       the norm adds to the residual stream, in place of the GEMM
    halves      the tokens in two halves; one is summed while the other computes
    tiles N     a GEMM of N parts of the rows; each is summed while the next is multiplied
    scattered   each rank gets the sum of half of the rows, normalises them, and all gather norms

Every way must give the output of serial, or of apart where it adds in the norm as well, but for
rounding: within what apart differs from serial, where random layers make the most of it. And all
ranks must have the same bits. Ways take turns. Results: bench/results/NAME.json
and NAME.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import matplotlib
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from bench.engine.ranks.model import ShardedModel
from bench.engine.ranks.overlap_ways import Way, applied, spans_of, ways_of
from bench.engine.ranks.processes import require_gpus, run_ranks
from bench.name_lists import names_among
from bench.record import RESULTS, write_result
from cli.cluster import free_ports
from engine.models.base import ForwardInputs
from engine.parallel.distributed import ParallelGroup, connect_gloo, host_of, meet

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CASES = {
    "2048": (2048,),
    "2 x 1024": (1024, 1024),
    "8192": (8192,),
    "4 x 2048": (2048,) * 4,
    "2 x 8192": (8192, 8192),
}
"""Prompts of a step by name."""
TINY_CASES = {"64": (64,), "4 x 16": (16,) * 4}
_FLOAT32_ERROR = 1e-5
_TIMEOUT = timedelta(seconds=60)


@dataclass(slots=True)
class Candidate:
    """One way to be timed; `turns` are milliseconds, `error` relative to serial's output."""

    way: Way
    step: Callable[[], Tensor]
    turns: list[float] = field(default_factory=list)
    error: float = 0.0


def transports_of(
    rank: int, device: torch.device, rendezvous: str, ranks: int, ctas: list[int]
) -> dict[int, Any]:
    """Returns process groups by the blocks of threads that they may take; see `Way`."""
    store = meet(rank, ranks, rendezvous, _TIMEOUT)
    found: dict[int, Any] = {}
    for count in {0, *ctas} if device.type == "cuda" else {0}:
        own = PrefixStore(f"ctas {count}", store)
        if device.type == "cpu":
            found[count] = connect_gloo(own, rank, ranks, host_of(rendezvous), _TIMEOUT)
            continue
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        if count:
            options.is_high_priority_stream = True
            options.config.max_ctas = count
        found[count] = ProcessGroupNCCL(own, rank, ranks, options)
    return found


def recorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns the step as one CUDA graph, which reads what the step has, at the same addresses."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()

    def replay(kept: Callable[[], Tensor] = step) -> Tensor:
        graph.replay()
        return out

    return replay


def turn_ms(step: Callable[[], Tensor], device: torch.device, steps: int) -> tuple[float, Tensor]:
    if device.type == "cpu":
        started = time.perf_counter()
        out = step()
        return 1e3 * (time.perf_counter() - started), out
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    out = step()
    start.record()
    for _ in range(steps):
        out = step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps, out


class Measurement:
    """Compares ways on one rank, while the others do the same."""

    def __init__(
        self, arguments: argparse.Namespace, rank: int, addresses: tuple[str, str]
    ) -> None:
        self.arguments, self.rank = arguments, rank
        ranks, ctas = arguments.ranks, arguments.ctas
        self.device = torch.device("cpu") if arguments.tiny else torch.device("cuda", rank)
        self.group = ParallelGroup(rank, ranks, self.device, addresses[0])
        self.transports = transports_of(rank, self.device, addresses[1], ranks, ctas)
        self.model = ShardedModel(
            "tiny" if arguments.tiny else "llama-3.1-8b", self.group, self.device
        )
        self.ways = ways_of([0] if arguments.tiny else ctas)

    def case(self, name: str, lengths: tuple[int, ...]) -> list[dict[str, object]]:
        """Returns a row for each way."""
        candidates = []
        for way in self.ways:
            pieces = [self.model.piece(spans) for spans in spans_of(lengths, way)]
            candidates.append(Candidate(way, self._step(way, pieces)))
        serial_out, _, apart_out = (candidate.step().clone() for candidate in candidates[:3])
        for candidate in candidates:
            adds_apart = candidate.way.kind == "scattered"
            candidate.error = self._error(candidate, apart_out if adds_apart else serial_out)
        self._check(candidates)
        for _ in range(self.arguments.rounds):
            for candidate in candidates:
                ms, _ = turn_ms(candidate.step, self.device, self.arguments.steps)
                candidate.turns.append(self._mean(ms))
        serial, without = (statistics.median(candidates[i].turns) for i in (0, 1))
        share = 1 - without / serial
        rows: list[dict[str, object]] = []
        for candidate in candidates:
            ms = statistics.median(candidate.turns)
            row: dict[str, object] = {"case": name, "way": candidate.way.name, "ms": round(ms, 3)}
            row |= {"of serial": round(ms / serial, 4), "sums' share": round(share, 4)}
            row |= {"ktok/s": round(sum(lengths) / ms, 2), "error": f"{candidate.error:.1e}"}
            rows.append(row)
            if self.rank == 0:
                print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        return rows

    def _step(self, way: Way, pieces: list[ForwardInputs]) -> Callable[[], Tensor]:
        transport = self.transports[way.ctas]

        def step() -> Tensor:
            with applied(way, self.model, self.group, transport) as finish:
                return self.model.run(pieces, finish)

        step()
        if self.device.type == "cpu" or self.arguments.eager:
            return step
        torch.cuda.synchronize(self.device)
        return recorded(step)

    def _error(self, candidate: Candidate, expected: Tensor) -> float:
        """Returns how far a way is from `expected`, after a look whether ranks agree, which they do
        not without sums."""
        found = candidate.step()
        first, *others = self.group.gather_rows(found).chunk(self.group.size)
        is_summed = candidate.way.kind != "no sums"
        if is_summed and any(not torch.equal(first, other) for other in others):
            sys.exit(f"{candidate.way.name} is wrong: ranks differ")
        return float((found - expected).float().norm() / expected.float().norm())

    def _check(self, candidates: list[Candidate]) -> None:
        """Exits if a way is wrong."""
        errors = {candidate.way.kind: candidate.error for candidate in candidates}
        most = max(_FLOAT32_ERROR, 2 * errors["apart"])
        for candidate in candidates:
            if candidate.way.kind != "no sums" and candidate.error > most:
                sys.exit(f"{candidate.way.name} is wrong: it differs by {candidate.error:.3g}")

    def _mean(self, ms: float) -> float:
        """Returns the mean over ranks."""
        own = torch.tensor([ms], dtype=torch.float32, device=self.device)
        return float(self.group.all_reduce(own).item()) / self.group.size


def plot(rows: list[dict[str, object]], name: str) -> None:
    """Plots each way's time as a part of serial's."""
    cases = list(dict.fromkeys(str(row["case"]) for row in rows))
    ways = list(dict.fromkeys(str(row["way"]) for row in rows))
    canvas, axis = plt.subplots(figsize=(9, 4.5))
    for at, way in enumerate(ways):
        values = [row["of serial"] for row in rows if row["way"] == way]
        places = [place + at / (len(ways) + 1) for place in range(len(cases))]
        axis.bar(places, values, width=1 / (len(ways) + 1), label=way)
    axis.axhline(1.0, color="grey", linestyle=":")
    axis.set_xticks([place + 0.4 for place in range(len(cases))], cases)
    axis.set(ylabel="time / serial", ylim=(0.7, 1.2), title="prefill by two tensor-parallel ranks")
    axis.legend(fontsize=7, ncols=2)
    canvas.tight_layout()
    canvas.savefig(RESULTS / f"{name}.png", dpi=120)
    plt.close(canvas)


def run_rank(rank: int, arguments: argparse.Namespace, addresses: tuple[str, str]) -> None:
    """Measures in one rank; the first one writes."""
    if not arguments.tiny:
        torch.cuda.set_device(rank)
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        measurement = Measurement(arguments, rank, addresses)
        cases = TINY_CASES if arguments.tiny else CASES
        for name in arguments.cases or cases:
            rows += measurement.case(name, cases[name])
    if rank == 0 and arguments.name:
        figures = {"ranks": arguments.ranks, "eager": arguments.eager, "rows": rows}
        print(write_result(arguments.name, figures))
        plot(rows, arguments.name)
    measurement.group.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=names_among(CASES), default=[], help="comma separated")
    parser.add_argument(
        "--ctas",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0, 16, 8],
        help="of NCCL beside GEMMs, comma separated; 0: its own choice, behind GEMMs",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of one turn")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="ranks on the CPU, a tiny model")
    parser.add_argument("--name", default="overlap", help="of the result files; empty: none")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.tiny:
        arguments.name = ""
    else:
        require_gpus(arguments.ranks)
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    sys.exit(run_ranks(arguments.ranks, run_rank, arguments, (first, second)))


if __name__ == "__main__":
    main()
