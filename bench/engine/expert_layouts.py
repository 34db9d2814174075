#!/usr/bin/env python3
"""Compares how two GPUs may share a mixture of experts, with each other and with one GPU.

    TP1        one GPU
    TP2        half of each head and of every expert
    EP2        half of each head, and half of the experts, whole
    DP2        all of attention for other requests, and half of every expert
    DP2+EP2    the same, and half of the experts, whole

Decode: the median step at batch 1 to 256, 1024 tokens of context. Prompts: one of 2048 tokens
alone, and many at once. Weights and prompts are random, so experts are chosen evenly.

    python -m bench.engine.expert_layouts                              two GPUs, about 5 minutes
    python -m bench.engine.expert_layouts --layouts TP1,EP2 --batches 1,64
    python -m bench.engine.expert_layouts --device cpu --shape tiny-experts --batches 1,4 \\
        --context 32 --steps 4 --prompts 2 --length 64                 whether it runs
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, replace

from bench.engine.models.shapes import SHAPES, shape_config
from bench.name_lists import names_among
from bench.record import write_result
from engine.config import ParallelConfig
from engine.speed.measurements import decode_steps, prompts_alone, prompts_together
from engine.speed.offline_engine import OfflineEngine, offline_engine

LAYOUTS = {
    "TP1": ParallelConfig(),
    "TP2": ParallelConfig(tensor_parallel_size=2),
    "EP2": ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True),
    "DP2": ParallelConfig(data_parallel_size=2),
    "DP2+EP2": ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` of one case in `unit`."""

    layout: str
    case: str
    value: float
    unit: str


def measure(layout: str, arguments: argparse.Namespace) -> list[Figure]:
    """Returns all figures of one layout. Starts and ends its engine."""
    parallel = LAYOUTS[layout]
    num_groups = parallel.data_parallel_size
    sizes = {-(-batch // count) for batch in arguments.batches for count in (1, num_groups)}
    if parallel.num_ranks > 1 and num_groups == 1:
        parallel = replace(parallel, all_reduce=arguments.all_reduce)
    config = shape_config(
        arguments.shape,
        device=arguments.device,
        max_num_seqs=max(arguments.batches),
        max_model_len=arguments.max_model_len,
        block_size=128 if arguments.device == "cuda" else 16,
        capture_sizes=tuple(sorted(sizes)),
        quantization=arguments.quantization,
    )
    cache = config.cache
    if arguments.device == "cpu":
        cache = replace(cache, num_blocks=1024)
    config = replace(config, parallel=parallel, cache=cache)
    budget = config.scheduler.max_num_batched_tokens
    found: list[Figure] = []

    def note(case: str, value: float, unit: str) -> None:
        found.append(Figure(layout, case, round(value, 4), unit))
        print(found[-1], flush=True)

    with offline_engine(config) as engine:
        note("blocks of KV of each rank", engine.core.num_blocks, "blocks")
        _warm_up(engine)
        for batch in arguments.batches:
            spread = decode_steps(engine, batch, arguments.context, arguments.steps, budget)
            note(f"decode, batch {batch}", 1e3 * spread.median_s, "ms")
        alone = statistics.median(prompts_alone(engine, arguments.length))
        note(f"a prompt of {arguments.length}", 1e3 * alone, "ms")
        seconds = prompts_together(engine, arguments.prompts, arguments.length)
        tokens = arguments.prompts * arguments.length
        note(f"{arguments.prompts} prompts of {arguments.length}", tokens / seconds / 1e3, "ktok/s")
    return found


def _warm_up(engine: OfflineEngine) -> None:
    engine.run([engine.request(100, 20) for _ in range(4)])


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layouts", type=names_among(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--batches", type=_numbers, default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=9216)
    parser.add_argument("--all-reduce", default="auto", help="see the setting")
    parser.add_argument("--quantization", default="", help="of the weights, such as fp8-block")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--name", default="", help="of the result file; default: by shape")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    figures = [one for layout in arguments.layouts for one in measure(layout, arguments)]
    cases = dict.fromkeys(one.case for one in figures)
    values = {(one.layout, one.case): one.value for one in figures}
    print("".join(f"{name:>14}" for name in ("", *arguments.layouts)))
    for case in cases:
        row = [values.get((layout, case), float("nan")) for layout in arguments.layouts]
        print(f"{case:28}" + "".join(f"{value:14.3f}" for value in row))
    name = arguments.name or f"expert_layouts-{arguments.shape}"
    if arguments.device == "cuda":
        print(write_result(name, [asdict(one) for one in figures]))


if __name__ == "__main__":
    main()
