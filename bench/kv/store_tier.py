#!/usr/bin/env python3
"""Measures prompts whose prefix comes from a KV store in another process: first token and rate.

Prompts of one prefix each and a short tail: computed the first time, when their blocks are given to
the store; then asked again by an engine that has forgotten them, cache and host memory, so that all
comes from the store.

    python -m bench.kv.store_tier                   # Llama 3.1 8B's shape on one GPU, 1 minute
    python -m bench.kv.store_tier --device cpu      # a tiny model

Needs Mooncake (`make mooncake`, or PYTHONPATH with the package). Goal on one H200, 8k tokens, the
store's memory in another process of the host: first token in 150 ms. Results:
bench/results/store_tier.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.arguments import parser_of
from bench.engine.models.shapes import SHAPES
from bench.figures import distribution
from bench.kv.host_tier import PLANS, Bench, Plan, engine_config, progress
from bench.kv.mooncake import Mooncake, mooncake, python_path
from bench.record import write_result
from engine.config import EngineConfig
from engine.sched.counters import PrefillRate
from engine.speed.offline_engine import offline_engine
from kv_transfer.tiers.host_tier import PooledHostTier

_CONNECT_LIMIT_S = 60.0


class StoreBench(Bench):
    """Knows what the store was given. Prompt 0 finds out whether it takes any."""

    def always_ask(self) -> None:
        """Has prompts come from the store also where computing them would be quicker."""
        self._engine.core.scheduler.remote.store._prefill_rate = PrefillRate()

    def reset(self) -> None:
        """Has the engine forget all KV; the store keeps what it has."""
        if not self._engine.core.scheduler.reset_prefix_cache():
            raise RuntimeError("something still holds blocks")

    @property
    def num_from_store(self) -> int:
        return self._engine.core.stats().prompt_tokens_from_store

    @property
    def num_put(self) -> int:
        assert isinstance(self.tier, PooledHostTier) and self.tier.store_index is not None
        return self.tier.store_index.totals["put"]

    def wait_until_connected(self) -> None:
        """Computes a prompt until the store has taken a block of it."""
        deadline = time.monotonic() + _CONNECT_LIMIT_S
        while not self.num_put:
            if time.monotonic() > deadline:
                raise RuntimeError("the store takes no block; its log says why")
            self.first_token_ms(0)
            self.settle()
            self.reset()

    def settle(self) -> None:
        """Waits until nothing is on its way to the store."""
        while self.tier.num_jobs:
            self.turn()


def measure(bench: StoreBench, plan: Plan) -> dict[str, object]:
    bench.wait_until_ready()
    bench.always_ask()
    with progress("connecting"):
        bench.wait_until_connected()
    with progress("computed, and given to the store"):
        at, put = time.monotonic(), bench.num_put
        computed = [bench.first_token_ms(i) for i in range(1, plan.prompts)]
        bench.settle()
        seconds, put = time.monotonic() - at, bench.num_put - put
    bench.clock.rates.clear()
    loaded: list[float] = []
    with progress("from the store"):
        for turn in range(plan.rounds):
            for index in range(1, plan.prompts):
                bench.reset()
                loaded.append(bench.first_token_ms(index))
            if turn == 0:
                loaded.clear()  # Rates are not known before it.
                bench.clock.rates.clear()
                before = bench.num_from_store
    share = (bench.num_from_store - before) / (len(loaded) * plan.prefix)
    return {
        "prefix tokens": plan.prefix,
        "first token, ms": {"computed": distribution(computed), "store": distribution(loaded)},
        "share of prefix tokens that came from the store": round(share, 3),
        "GB/s, store to GPU": distribution(bench.clock.rates),
        "GB/s given to the store while prompts are computed": round(
            put * bench.clock.block_bytes / seconds / 1e9, 3
        ),
    }


def with_store(config: EngineConfig, store: Mooncake, query: str) -> EngineConfig:
    assert config.kv_transfer is not None
    url = f"{store.url}?{query}" if query else store.url
    return replace(config, kv_transfer=replace(config.kv_transfer, store_tier_url=url))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, help="of their own prefix each")
    parser.add_argument("--processes", type=int, help="transfer processes of the rank")
    parser.add_argument("--keepers", type=int, default=4, help="processes that lend memory")
    parser.add_argument("--query", default="", help="of the store's URL, such as protocol=rdma")
    parser.add_argument("--name", default="store_tier", help="of the result file; empty: none")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    plan = PLANS[args.device]
    plan = replace(
        plan, prompts=1 + (args.prompts or 6), processes=args.processes or plan.processes, rows=1
    )
    shape = args.shape or ("llama-3.1-8b" if args.device == "cuda" else "tiny")
    config = engine_config(shape, args.device, plan)
    os.environ["PYTHONPATH"] = python_path()
    layout, block_size = config.kv_layout, config.cache.block_size
    needed = plan.prompts * -(-plan.prefix // block_size) * layout.block_bytes
    with (
        tempfile.TemporaryDirectory() as log,
        mooncake(Path(log), 64 + 2 * needed // args.keepers // 2**20, args.keepers) as store,
        offline_engine(with_store(config, store, args.query)) as engine,
    ):
        try:
            figures = {"shape": shape, "transfer processes": plan.processes}
            figures["processes of the store"] = args.keepers
            figures |= measure(StoreBench(engine, config, plan), plan)
        finally:
            engine.core.shutdown()
    print(json.dumps(figures, indent=1))
    if args.name:
        print(write_result(args.name, figures))


if __name__ == "__main__":
    main()
