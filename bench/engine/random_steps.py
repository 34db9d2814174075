#!/usr/bin/env python3
"""Looks for kernels that are compiled while an engine serves: random traffic, and a guard.

A model of a few layers, as wide as the shape it has its name from, with random weights. Requests
of all lengths and samplings come in regimes (few, many, short, long, prefixes that return, several
answers, beams), and the scheduler makes steps of them. A kernel that is compiled after the start
holds all up for a second or more; each is listed with the step that wanted it.

    python -m bench.engine.random_steps --shapes llama-3.1-8b,gpt-oss-20b --steps 10000
    python -m bench.engine.random_steps --shapes llama-3.1-8b --variants plain,fp8,drafts --seed 7
    python -m bench.engine.random_steps --shapes tiny-experts --device cpu --steps 300   # try it

Ends with 1 if something was compiled. Results: bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field, replace

from bench.arguments import names_among, parser_of
from bench.engine.models.planted import with_drafts
from bench.engine.models.shapes import QUANTIZATIONS, SHAPES, shape_config
from bench.engine.random_traffic import RandomTraffic
from bench.record import write_result
from engine.config import EngineConfig
from engine.contracts.group_step import Step
from engine.contracts.scheduler_output import SchedulerOutput
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.errors import CheckpointError
from engine.speed.offline_engine import OfflineEngine, offline_engine

_NUM_LAYERS = {"qwen3.5-35b-a3b": 4, "qwen3-next-80b-a3b": 4}
"""As many as every kind of layer needs to be there; others: 2."""
_MAX_MODEL_LEN = 24_576
_DRAFTS = 3
_KV_BYTES = 4 << 30
"""Leaves out the profiling run, which compiles kernels as well: warming up has to do it alone. And
several of these engines find room on one GPU."""
VARIANTS = ("plain", "drafts", "kv-fp8", "deterministic", "eager", *QUANTIZATIONS)


@dataclass(frozen=True, slots=True)
class LateCompile:
    """A kernel that was compiled after the start. `prompts`: the tokens of the step's prompts, and
    of what was computed before each."""

    kernel: str
    prompts: list[tuple[int, int]]
    num_decodes: int
    seconds: float


@dataclass(slots=True)
class Found:
    """Holds what one engine gave."""

    shape: str
    variant: str
    start_s: float = 0.0
    num_steps: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    longest_step_s: float = 0.0
    late: list[LateCompile] = field(default_factory=list)


class WatchedExecutor(UniprocExecutor):
    """Notes which step made the guard add to its list."""

    def __init__(self, config: EngineConfig, found: Found) -> None:
        super().__init__(config)
        self._found = found
        self._computed: dict[int, int] = {}
        """Tokens with KV of each row that has a prompt."""

    def execute_model(self, step: Step) -> None:
        assert isinstance(step, SchedulerOutput)
        found, guard = self._found, self._worker.compile_guard
        known, (num_decodes, _) = len(guard.late), self._worker.runner.size_of(step)
        started = time.perf_counter()
        super().execute_model(step)
        seconds = time.perf_counter() - started
        found.num_steps += 1
        found.longest_step_s = round(max(found.longest_step_s, seconds), 3)
        prompts = self._prompts(step)
        for kernel in guard.late[known:]:
            found.late.append(LateCompile(kernel, prompts, num_decodes, round(seconds, 3)))
            print(f"\n{kernel}\n  {num_decodes} decodes, prompts {prompts}", flush=True)

    def _prompts(self, step: SchedulerOutput) -> list[tuple[int, int]]:
        """Returns the tokens of each chunk, and of what was there before it."""
        self._computed |= {new.row: new.num_computed_tokens for new in step.new_reqs}
        prompts = [(length, self._computed[row]) for row, length in step.prefill_chunks]
        for row, length in step.prefill_chunks:
            self._computed[row] += length
        return prompts


def config_of(shape: str, variant: str, device: str) -> EngineConfig:
    """Returns an engine of few layers, with the prefix cache."""
    on_cpu = device == "cpu"
    config = shape_config(
        shape,
        device=device,
        num_layers=_NUM_LAYERS.get(shape, 2),
        max_model_len=2048 if on_cpu else _MAX_MODEL_LEN,
        max_num_seqs=16 if on_cpu else 256,
        max_num_batched_tokens=256 if on_cpu else 8192,
        block_size=16 if on_cpu else 128,
        quantization=variant if variant in QUANTIZATIONS else "",
        kv_cache_dtype="fp8" if variant == "kv-fp8" else "auto",
        deterministic=variant == "deterministic",
        enforce_eager=variant == "eager",
    )
    cache = replace(config.cache, enable_prefix_caching=True, kv_cache_memory_bytes=_KV_BYTES)
    config = replace(config, cache=cache)
    if variant == "drafts":
        config = with_drafts(config, _DRAFTS, lookup=(1, 4))
    return config


def run(engine: OfflineEngine, traffic: RandomTraffic, found: Found, num_steps: int) -> None:
    """Serves until `num_steps` steps were computed, and all requests have ended."""
    core, last = engine.core, -1
    running: set[str] = set()
    while found.num_steps < num_steps or not core.is_idle:
        if (found.num_steps != last or core.is_idle) and found.num_steps < num_steps:
            last = found.num_steps
            for request in traffic.requests(last, len(running)):
                found.num_requests += 1
                found.num_prompt_tokens += len(request.spec.prompt_token_ids)
                running.update(request.choice_ids or (request.request_id,))
                core.handle(request)
            if last % 100 == 0:
                print(f"\r{found.shape} {found.variant}: step {last}", end="", file=sys.stderr)
        ended = [output for output in core.step().outputs if output.finish_reason]
        running.difference_update(output.request_id for output in ended)
        if failed := [output.error for output in ended if output.error]:
            raise RuntimeError(f"a request failed: {failed[0]}")
        if not ended:
            engine.wait()


def measure(shape: str, variant: str, arguments: argparse.Namespace) -> Found:
    """Starts an engine and serves random traffic. Raises `CheckpointError`: the shape has no such
    variant."""
    config, found = config_of(shape, variant, arguments.device), Found(shape, variant)
    model, limits = config.model, config.scheduler
    traffic = RandomTraffic(
        arguments.seed, model.vocab_size, model.max_model_len, limits.max_num_seqs
    )
    with offline_engine(config, WatchedExecutor(config, found)) as engine:
        found.start_s, found.num_steps, found.longest_step_s = round(engine.start_s, 1), 0, 0.0
        run(engine, traffic, found, arguments.steps)
    print(f"\r{shape} {variant}: {found.num_steps} steps, {len(found.late)} late", flush=True)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "random-steps")
    parser.add_argument(
        "--shapes", type=names_among(SHAPES), default=["llama-3.1-8b"], help="comma separated"
    )
    parser.add_argument(
        "--variants", type=names_among(VARIANTS), default=["plain"], help="comma separated"
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    everything: list[Found] = []
    for shape in arguments.shapes:
        for variant in arguments.variants:
            try:
                everything.append(measure(shape, variant, arguments))
            except CheckpointError as error:
                print(f"left out: {shape} {variant}: {error}", flush=True)
                continue
            write_result(arguments.name, [asdict(found) for found in everything])
    late = sum(len(found.late) for found in everything)
    print(f"{sum(found.num_steps for found in everything)} steps, {late} late compiles")
    sys.exit(late > 0)


if __name__ == "__main__":
    main()
