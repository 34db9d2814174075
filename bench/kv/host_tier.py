#!/usr/bin/env python3
"""Measures prompts whose prefix comes back from host memory: first token, rate, and what rows that
decode meanwhile notice of it.

Prompts of one prefix each and a short tail, one after the other: computed the first time; with the
prefix in the cache; later asked again when others have filled the cache, so that the prefix is
loaded. Then rows decode, and the same prompts come every now and then, once with the prefix in the
cache and once with a load: the time between tokens differs by what loads cost.

    python -m bench.kv.host_tier                    # Llama 3.1 8B's shape on one GPU, 2 minutes
    python -m bench.kv.host_tier --device cpu       # a tiny model

Goals on one H200, 8k tokens: first token in 40 ms (198 ms computed), p99 of the time between tokens
1.05 times that without loads, loads at 40 GB/s. Results: bench/results/host_tier.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import zmq

from bench.arguments import parser_of
from bench.engine.models.shapes import SHAPES, shape_config
from bench.figures import distribution, percentile
from bench.record import write_result
from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.speed.offline_engine import OfflineEngine, offline_engine
from kv_transfer.config import KVTransferConfig
from kv_transfer.tier import Tier
from kv_transfer.tiers.host_tier import PooledHostTier


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what is measured on a device. Lengths in tokens."""

    prefix: int
    tail: int
    prompts: int
    """As many do not fit into the cache."""
    rounds: int
    rows: int
    row_tokens: int
    steps_between: int
    """Results between two prompts, while rows decode."""
    arrivals: int
    processes: int


PLANS = {
    "cuda": Plan(8192, 64, 14, 4, 32, 128, 40, 24, 4),
    "cpu": Plan(128, 8, 4, 2, 2, 16, 10, 4, 2),
}


class LoadClock:
    """Takes the time of each load, from the call until all processes have done it."""

    def __init__(self, tier: PooledHostTier, block_bytes: int) -> None:
        self.rates: list[float] = []
        """GB/s of loads that went well."""
        self._begun: dict[int, tuple[float, int]] = {}
        self.block_bytes = block_bytes
        self._load, self._take_finished = tier.load, tier.take_finished
        tier.load = self.load  # type: ignore[method-assign]
        tier.take_finished = self.take_finished  # type: ignore[method-assign]

    def load(self, names: Sequence[bytes], blocks: list[int], behind: Tier = Tier.DISK) -> int:
        at = time.monotonic()
        job = self._load(names, blocks, behind)
        self._begun[job] = at, len(blocks)
        return job

    def take_finished(self) -> dict[int, bool]:
        finished = self._take_finished()
        for job, is_right in finished.items():
            if job in self._begun:
                at, blocks = self._begun.pop(job)
                if is_right:
                    seconds = time.monotonic() - at
                    self.rates.append(blocks * self.block_bytes / seconds / 1e9)
        return finished


class Bench:
    """Drives one engine, whose loop runs here."""

    def __init__(self, engine: OfflineEngine, config: EngineConfig, plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._poller = zmq.Poller()
        for source in (*engine.executor.poll_sources, engine.core.connector.fileno()):
            self._poller.register(source, zmq.POLLIN)
        made = [engine.request(plan.prefix, 1) for _ in range(plan.prompts)]
        self._prefixes = [request.spec.prompt_token_ids for request in made]
        tier = engine.core.connector.host_tier
        assert tier is not None
        self.tier = tier
        self.clock = LoadClock(tier, config.kv_layout.block_bytes)

    @property
    def num_loaded(self) -> int:
        return self._engine.core.stats().prompt_tokens_loaded

    def turn(self) -> list[EngineCoreOutput]:
        """Waits for something to happen. Returns what came out."""
        self._poller.poll(1000)
        return self._engine.core.step().outputs

    def prompt(self, index: int) -> EngineCoreRequest:
        """Makes a request with a known prefix and a new tail."""
        request = self._engine.request(self._plan.tail, 1)
        prompt = [*self._prefixes[index], *request.spec.prompt_token_ids]
        return msgspec.structs.replace(request, spec=RequestSpec(prompt, request.spec.sampling))

    def first_token_ms(self, index: int) -> float:
        """Asks alone, and returns when it has settled."""
        core, request = self._engine.core, self.prompt(index)
        at = time.monotonic()
        core.handle(request)
        outputs = core.step().outputs
        while not any(output.new_token_ids for output in outputs):
            outputs = self.turn()
        found = (time.monotonic() - at) * 1e3
        self.settle()
        return found

    def settle(self) -> None:
        """Waits until all is answered, and KV has gone wherever it goes."""
        while not self._engine.core.is_idle or self.tier.num_jobs:
            self.turn()

    def wait_until_ready(self) -> None:
        while not self.tier.is_ready:
            self.turn()

    def pauses_ms(self, *, is_loaded: bool) -> list[float]:
        """Returns the times between tokens of rows that decode, while prompts come whose prefix is
        loaded, or in the cache."""
        plan, core = self._plan, self._engine.core
        num_steps = plan.steps_between * (plan.arrivals + 4)
        rows = [self._engine.request(plan.row_tokens, num_steps) for _ in range(plan.rows)]
        for row in rows:
            core.handle(row)
        watched, results, at = rows[0].request_id, 0, 0.0
        pauses: list[float] = []
        is_decoding = set[str]()
        index, ended = 0, set[str]()
        outputs = core.step().outputs
        while len(ended) < len(rows):
            now = time.perf_counter()
            is_decoding.update(one.request_id for one in outputs)
            ended.update(one.request_id for one in outputs if one.finish_reason) if outputs else ()
            ended &= {row.request_id for row in rows}
            if any(one.request_id == watched and one.new_token_ids for one in outputs):
                results += 1
                if at and index and len(is_decoding) >= len(rows):
                    pauses.append((now - at) * 1e3)
                at = now
                if results % plan.steps_between == 0 and index < plan.arrivals:
                    core.handle(self.prompt(index % plan.prompts if is_loaded else 0))
                    index += 1
            outputs = self.turn()
        self.settle()
        return pauses


def engine_config(shape: str, device: str, plan: Plan) -> EngineConfig:
    """Returns a prefill node's engine, whose cache holds the rows and a third of the prompts."""
    block_size = 128 if device == "cuda" else 16
    longest = plan.prefix + 2 * plan.tail
    row_length = plan.row_tokens + plan.steps_between * (plan.arrivals + 4)
    config = shape_config(
        shape,
        device=device,
        max_model_len=max(longest, row_length),
        max_num_seqs=plan.rows + 2,
        max_num_batched_tokens=8192 if device == "cuda" else 256,
        block_size=block_size,
        capture_sizes=tuple(2**i for i in range(6)) if device == "cuda" else (),
    )
    of_prompt = -(-longest // block_size)
    of_rows = plan.rows * -(-row_length // block_size)
    cache = replace(
        config.cache,
        enable_prefix_caching=True,
        num_blocks=of_prompt * (plan.prompts // 3) + of_rows,
    )
    block_bytes = config.kv_layout.block_bytes
    transfer = KVTransferConfig(
        kv_role="kv_producer",
        num_processes=plan.processes,
        host_tier_bytes=(of_prompt * (plan.prompts + 2) + of_rows) * block_bytes,
    )
    return replace(config, cache=cache, kv_transfer=transfer)


def measure(bench: Bench, plan: Plan) -> dict[str, object]:
    bench.wait_until_ready()
    bench.first_token_ms(0)
    with progress("computed"):
        computed = [bench.first_token_ms(i) for i in range(1, plan.prompts)]
    with progress("cached"):
        bench.first_token_ms(0)
        cached = [bench.first_token_ms(0) for _ in range(plan.prompts)]
    with progress("loaded"):
        before = bench.num_loaded
        loaded = [bench.first_token_ms(i) for _ in range(plan.rounds) for i in range(plan.prompts)]
        share = (bench.num_loaded - before) / (len(loaded) * plan.prefix)
    alone = list(bench.clock.rates)
    bench.clock.rates.clear()
    with progress("rows, prefixes in the cache"):
        bench.first_token_ms(0)
        in_cache = bench.pauses_ms(is_loaded=False)
    with progress("rows, prefixes loaded"):
        before = bench.num_loaded
        beside = bench.pauses_ms(is_loaded=True)
        loads = (bench.num_loaded - before) / plan.prefix
    return {
        "prefix tokens": plan.prefix,
        "first token, ms": {
            "computed": distribution(computed),
            "loaded": distribution(loaded),
            "cached": distribution(cached),
        },
        "share of prefix tokens that were loaded": round(share, 3),
        "GB/s of a load alone": distribution(alone),
        "GB/s of a load beside rows": distribution(bench.clock.rates),
        "time between tokens, ms": {
            "rows": plan.rows,
            "prefixes in the cache": distribution(in_cache),
            "prefixes loaded": distribution(beside),
            "p99 ratio": round(p99(beside) / p99(in_cache), 3),
            "prefixes loaded meanwhile": round(loads, 2),
        },
        "tier": bench.tier.counters,
    }


def p99(values: list[float]) -> float:
    return percentile(sorted(values), 0.99)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Tells what begins, and how long it took."""
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    yield
    print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def parse(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Returns what both commands read."""
    parser = parser_of(doc, name)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--processes", type=int, help="transfer processes of the rank")
    return parser


def plan_of(args: argparse.Namespace, **changed: int) -> tuple[str, Plan, EngineConfig]:
    """Returns shape, plan and engine."""
    plan = PLANS[args.device]
    plan = replace(plan, processes=args.processes or plan.processes, **changed)
    shape = args.shape or ("llama-3.1-8b" if args.device == "cuda" else "tiny")
    return shape, plan, engine_config(shape, args.device, plan)


def main() -> None:
    args = parse(__doc__, "host_tier").parse_args()
    shape, plan, config = plan_of(args)
    with offline_engine(config) as engine:
        try:
            figures = {"shape": shape, "transfer processes": plan.processes}
            figures |= measure(Bench(engine, config, plan), plan)
        finally:
            engine.core.shutdown()
    print(json.dumps(figures, indent=1))
    if args.device == "cuda":
        print(write_result(args.name, figures))


if __name__ == "__main__":
    main()
