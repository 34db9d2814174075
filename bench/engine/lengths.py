#!/usr/bin/env python3
"""Single prompts of many lengths, most of them no powers of two: the time to the first token, and
what each pays for rows that are not its own.

    python -m bench.engine.lengths --plan                   # without a GPU: padding and tiles alone
    python -m bench.engine.lengths                          # 300 to 4000 tokens, 8B shape
    python -m bench.engine.lengths --first 500 --last 1100 --step 23
    python -m bench.engine.lengths --disabled-fast-paths prompt-graphs --name lengths-launched
    python -m bench.engine.lengths --peer vllm.json         # {"300": 9.1, ...}: milliseconds
    python -m bench.engine.lengths --peer-weights           # drawn as vLLM draws its own
    python -m bench.engine.lengths --shape qwen3-30b-a3b --quantization fp8 --uniform-routing

Lengths take turns, so that a GPU that gets warmer slows all of them alike. `host_ms` is what the
worker's host needs to start the step: a prompt cannot take less. Results: bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.arguments import parser_of
from bench.engine.models.peer_weights import peer_weights
from bench.engine.models.shapes import QUANTIZATIONS, SHAPES, shape_config
from bench.engine.models.uniform_routing import uniform_routing
from bench.engine.timing.length_costs import LengthCost, describe, length_costs
from bench.record import write_result
from engine.executor.uniproc_executor import UniprocExecutor
from engine.speed.measurements import duration_s
from engine.speed.offline_engine import OfflineEngine, offline_engine


@dataclass(slots=True)
class Times:
    """Holds milliseconds of one length: until its first token, and of the worker's host."""

    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)


def measure(engine: OfflineEngine, lengths: list[int], turns: int) -> dict[int, Times]:
    """Times each length `turns` times; each has been computed once before."""
    found = {length: Times() for length in lengths}
    for turn in range(turns + 1):
        for length in lengths:
            host_s = engine.executor.host_s
            seconds = duration_s(engine, [engine.request(length, 1)])
            if turn > 0:
                found[length].ms.append(round(1e3 * seconds, 3))
                found[length].host_ms.append(1e3 * (engine.executor.host_s - host_s))
    return found


def rows_of(
    costs: list[LengthCost], times: dict[int, Times], peer: dict[int, float]
) -> list[dict[str, object]]:
    """Returns an entry for each length: its cost, times where they were measured, and how they
    compare with the peer's: above 1 is slower."""
    entries = []
    for cost in costs:
        entry: dict[str, object] = {
            **asdict(cost),
            "wasted": cost.wasted,
            "wasted_in_tiles": cost.wasted_in_tiles,
        }
        if found := times.get(cost.length):
            median = statistics.median(found.ms)
            entry |= {"median_ms": median, "least_ms": min(found.ms)}
            entry["host_ms"] = round(statistics.median(found.host_ms), 3)
            if cost.length in peer:
                entry["against_peer"] = round(median / peer[cost.length], 3)
        entries.append(entry)
    return entries


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--first", type=int, default=300, help="shortest prompt")
    parser.add_argument("--last", type=int, default=4000, help="longest prompt")
    parser.add_argument("--step", type=int, default=100, help="tokens between them")
    parser.add_argument("--turns", type=int, default=7, help="times that each is measured")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument(
        "--disabled-fast-paths", default="", help="comma separated; see the setting"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peer", type=Path, help="file of a peer's milliseconds by length")
    parser.add_argument(
        "--peer-weights", action="store_true", help="as a peer's, in one process, on one GPU"
    )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="", help="of the weights")
    parser.add_argument(
        "--uniform-routing", action="store_true", help="to experts, in one process, on one GPU"
    )
    parser.add_argument("--plan", action="store_true", help="measure nothing")
    parser.add_argument("--name", default="", help="of the result files; default: by shape")
    arguments = parser.parse_args()
    if (arguments.peer_weights or arguments.uniform_routing) and arguments.tp > 1:
        parser.error("--peer-weights and --uniform-routing: one process, one GPU")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    lengths = list(range(arguments.first, arguments.last + 1, arguments.step))
    peer: dict[int, float] = {}
    if arguments.peer is not None:
        peer = {int(length): ms for length, ms in json.loads(arguments.peer.read_text()).items()}
    config = shape_config(
        arguments.shape,
        device=arguments.device,
        max_model_len=max(arguments.last + 64, 9216),
        tensor_parallel_size=arguments.tp,
        disabled_fast_paths=tuple(filter(None, arguments.disabled_fast_paths.split(","))),
        quantization=arguments.quantization,
    )
    costs = length_costs(config, lengths)
    print(describe(costs))
    name = arguments.name or f"lengths-{arguments.shape}" + ("-plan" if arguments.plan else "")
    times: dict[int, Times] = {}
    if not arguments.plan:
        in_process = arguments.peer_weights or arguments.uniform_routing
        with ExitStack() as stack:
            if arguments.peer_weights:
                stack.enter_context(peer_weights())
            if arguments.uniform_routing:
                stack.enter_context(uniform_routing(config.scheduler.max_num_batched_tokens))
            executor = UniprocExecutor(config) if in_process else None
            engine = stack.enter_context(offline_engine(config, executor))
            times = measure(engine, lengths, arguments.turns)
    entries = rows_of(costs, times, peer)
    for entry in entries:
        if "median_ms" in entry:
            print(
                {key: entry.get(key) for key in ("length", "median_ms", "host_ms", "against_peer")}
            )
    result = {"shape": arguments.shape, "tp": arguments.tp, "lengths": entries}
    result["peer_weights"] = arguments.peer_weights
    result["uniform_routing"] = arguments.uniform_routing
    print(write_result(name, result))


if __name__ == "__main__":
    main()
