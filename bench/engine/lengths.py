#!/usr/bin/env python3
"""Single prompts of many lengths, most of them no powers of two: the time to the first token, and
what each pays for rows that are not its own.

    python -m bench.engine.lengths --plan                   # without a GPU: padding and tiles alone
    python -m bench.engine.lengths                          # 300 to 4000 tokens, 8B shape
    python -m bench.engine.lengths --first 500 --last 1100 --step 23
    python -m bench.engine.lengths --disabled-fast-paths prompt-graphs --name lengths-launched
    python -m bench.engine.lengths --peer vllm.json         # {"300": 9.1, ...}: milliseconds
    python -m bench.engine.lengths --peer-weights           # drawn as vLLM draws its own

Lengths take turns, so that a GPU that gets warmer slows all of them alike. Results:
bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench.arguments import parser_of
from bench.engine.models.peer_weights import peer_weights
from bench.engine.models.shapes import SHAPES, shape_config
from bench.engine.timing.length_costs import LengthCost, describe, length_costs
from bench.record import write_result
from engine.executor.uniproc_executor import UniprocExecutor
from engine.speed.measurements import duration_s
from engine.speed.offline_engine import OfflineEngine, offline_engine


def measure(engine: OfflineEngine, lengths: list[int], turns: int) -> dict[int, list[float]]:
    """Returns milliseconds to the first token of each length, sorted; each length has been computed
    once before."""
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for turn in range(turns + 1):
        for length in lengths:
            seconds = duration_s(engine, [engine.request(length, 1)])
            if turn > 0:
                times[length].append(round(1e3 * seconds, 3))
    return {length: sorted(found) for length, found in times.items()}


def rows_of(
    costs: list[LengthCost], times: dict[int, list[float]], peer: dict[int, float]
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
            median = statistics.median(found)
            entry |= {"median_ms": median, "least_ms": found[0]}
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
    parser.add_argument("--plan", action="store_true", help="measure nothing")
    parser.add_argument("--name", default="", help="of the result files; default: by shape")
    arguments = parser.parse_args()
    if arguments.peer_weights and arguments.tp > 1:
        parser.error("--peer-weights runs the worker in this process: one GPU")
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
    )
    costs = length_costs(config, lengths)
    print(describe(costs))
    name = arguments.name or f"lengths-{arguments.shape}" + ("-plan" if arguments.plan else "")
    times: dict[int, list[float]] = {}
    if not arguments.plan:
        with ExitStack() as stack:
            executor = None
            if arguments.peer_weights:
                stack.enter_context(peer_weights())
                executor = UniprocExecutor(config)
            engine = stack.enter_context(offline_engine(config, executor))
            times = measure(engine, lengths, arguments.turns)
    entries = rows_of(costs, times, peer)
    for entry in entries:
        if "median_ms" in entry:
            print({key: entry.get(key) for key in ("length", "median_ms", "against_peer")})
    result = {"shape": arguments.shape, "tp": arguments.tp, "lengths": entries}
    result["peer_weights"] = arguments.peer_weights
    print(write_result(name, result))


if __name__ == "__main__":
    main()
