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
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.arguments import names_among, parser_of
from bench.engine.models.planted import with_drafts
from bench.engine.models.shapes import QUANTIZATIONS, SHAPES, shape_config
from bench.record import write_result
from engine.config import EngineConfig
from engine.contracts.group_step import Step
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.errors import CheckpointError
from engine.speed.offline_engine import OfflineEngine, offline_engine

_STEPS_OF_A_REGIME = 120
_CONCURRENCY = (1, 2, 3, 5, 8, 13, 24, 48, 96, 160, 256)
_LONGEST = (4, 40, 300, 1500, 6000, 20_000)
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.6, "presence_penalty": 1.0, "logprobs": 1},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.9, "logprobs": 20, "top_p": 0.5},
    {"temperature": 0.3, "logprobs": 5, "prompt_logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 0},
    {"temperature": 0.7, "logit_bias": {5: 1.5, 17: -3.0}, "min_tokens": 1, "stop_token_ids": (8,)},
    {"temperature": 0.7, "allowed_token_ids": (5, 6, 7, 90), "bad_words": ((5, 6), (7,))},
    {"temperature": 0.5, "logprob_token_ids": (3, 4, 5), "logprobs": 3},
)


@dataclass(frozen=True, slots=True)
class Regime:
    """Describes traffic for a while.

    Attributes:
        running: Requests at once, about.
        longest: Prompt tokens at most; they are spread evenly over the logarithm.
        max_tokens: Of an answer at most.
        kinds: What requests ask of their sampling.
        repeats: The share of prompts that begin like an earlier one.
    """

    running: int
    longest: int
    max_tokens: int
    kinds: Sequence[dict[str, Any]]
    repeats: float


class RandomTraffic:
    """Makes requests, and changes its regime every 120 steps.

    Args:
        seed: The same seed makes the same requests where steps are the same.
        max_model_len: Prompt and answer together.
        max_num_seqs: Running requests at most.
    """

    def __init__(self, seed: int, vocab_size: int, max_model_len: int, max_num_seqs: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._max_num_seqs = max_num_seqs
        self._made = 0
        self._earlier: list[list[int]] = []
        self.regime = self._next_regime()

    def requests(self, num_steps: int, num_running: int) -> list[EngineCoreRequest]:
        """Returns those that come before step `num_steps`, while `num_running` have not ended."""
        if num_steps % _STEPS_OF_A_REGIME == 0:
            self.regime = self._next_regime()
        room = self.regime.running - num_running
        # Some steps get none, so that batches grow and shrink.
        wanted = self._random.randint(0, max(0, room)) if self._random.random() < 0.5 else 0
        return [self._request() for _ in range(max(wanted, int(num_running == 0)))]

    def _next_regime(self) -> Regime:
        chance = self._random
        running = min(chance.choice(_CONCURRENCY), self._max_num_seqs)
        most = max(1, self._max_model_len - 2)
        return Regime(
            running=running,
            longest=min(chance.choice(_LONGEST), most),
            max_tokens=chance.choice((1, 4, 30, 200)),
            kinds=chance.sample(_KINDS, chance.choice((1, 1, 3, len(_KINDS)))),
            repeats=chance.choice((0.0, 0.0, 0.5)),
        )

    def _request(self) -> EngineCoreRequest:
        chance, regime = self._random, self.regime
        self._made += 1
        length = max(1, round(regime.longest ** chance.random()))
        prompt = self._prompt(length)
        max_tokens = chance.randint(1, min(regime.max_tokens, self._max_model_len - len(prompt)))
        kind = chance.choice(regime.kinds)
        beam = None
        if chance.random() < 0.02:
            kind, beam = {}, BeamParams(width=chance.choice((2, 4, 8)))
        sampling = SamplingParams(
            seed=chance.getrandbits(64), max_tokens=max_tokens, ignore_eos=True, beam=beam, **kind
        )
        spec, name = RequestSpec(prompt, sampling), str(self._made)
        choices: tuple[str, ...] = ()
        if beam is None and "prompt_logprobs" not in kind and chance.random() < 0.05:
            count = chance.randint(2, min(8, self._max_num_seqs))
            others = [spec.with_sampling(seed=chance.getrandbits(64)) for _ in range(count - 1)]
            spec = spec.with_siblings(others)
            choices = tuple(f"{name}.{index}" for index in range(count))
        return EngineCoreRequest(request_id=name, spec=spec, choice_ids=choices)

    def _prompt(self, length: int) -> list[int]:
        chance = self._random
        prompt: list[int] = []
        if self._earlier and chance.random() < self.regime.repeats:
            prompt = chance.choice(self._earlier)[:length]
        # Words that return, so that drafts by n-grams find some.
        words = [chance.randrange(1, self._vocab_size) for _ in range(min(64, length))]
        prompt = prompt + chance.choices(words, k=length - len(prompt))
        self._earlier = [*self._earlier[-7:], prompt]
        return prompt


_NUM_LAYERS = {"qwen3.5-35b-a3b": 4, "qwen3-next-80b-a3b": 4, "gpt-oss-20b": 4}
"""As many as every kind of layer needs to be there, and not only as the last, which attends to few
rows; others: 2."""
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
