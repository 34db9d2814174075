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

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.figures import distribution
from bench.kv.host_tier import Bench, Plan, parse, plan_of, progress
from bench.kv.mooncake import Mooncake, mooncake, python_path
from bench.record import write_result
from engine.config import EngineConfig
from engine.sched.counters import PrefillRate
from engine.speed.offline_engine import offline_engine
from kv_transfer.tier import FetchTimes, HostTierEvent, LoadTimes, Tier, TierEvent
from kv_transfer.tiers.host_tier import PooledHostTier

_CONNECT_LIMIT_S = 60.0


class Phases:
    """Divides the times to first tokens by what was waited for last: the store's answer, bytes from
    it, checksums of the last of them, copies to the GPU of the last of them, the step."""

    def __init__(self, tier: PooledHostTier) -> None:
        self.of_prompts: dict[str, list[float]] = {}
        """In milliseconds."""
        self._times: list[FetchTimes | LoadTimes] = []
        self._loads: list[float] = []
        self._apply, self._load = tier.apply, tier.load
        tier.apply = self._applied  # type: ignore[method-assign]
        tier.load = self._loaded  # type: ignore[method-assign]

    def _applied(self, event: TierEvent) -> None:
        if isinstance(event, HostTierEvent) and event.times is not None:
            self._times.append(event.times)
        self._apply(event)

    def _loaded(self, names: Sequence[bytes], blocks: list[int], behind: Tier = Tier.DISK) -> int:
        self._loads.append(time.monotonic())
        return self._load(names, blocks, behind)

    def begin(self) -> None:
        self._times.clear()
        self._loads.clear()

    def end(self, began: float, first_token_ms: float) -> None:
        """Records a prompt whose KV came from the store."""
        fetches = [one for one in self._times if isinstance(one, FetchTimes)]
        copies = [one.ended for one in self._times if isinstance(one, LoadTimes)]
        marks = [
            began, self._loads[0], max(one.got for one in fetches),
            max(one.ended for one in fetches), max(copies), began + first_token_ms / 1e3,
        ]  # fmt: skip
        names = "ask", "get", "check of the last", "copy of the last", "step"
        for name, start, stop in zip(names, marks, marks[1:], strict=False):
            self.of_prompts.setdefault(name, []).append(1e3 * (stop - start))
        for name, value in (
            ("calls of get, summed", sum(one.get_s for one in fetches)),
            ("calls of check, summed", sum(one.check_s for one in fetches)),
        ):
            self.of_prompts.setdefault(name, []).append(1e3 * value)

    def figures(self) -> dict[str, float]:
        """Returns medians."""
        return {name: round(median(found), 2) for name, found in self.of_prompts.items()}


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
    assert isinstance(bench.tier, PooledHostTier)
    phases = Phases(bench.tier)
    with progress("from the store"):
        for turn in range(plan.rounds):
            for index in range(1, plan.prompts):
                bench.reset()
                phases.begin()
                began = time.monotonic()
                loaded.append(bench.first_token_ms(index))
                phases.end(began, loaded[-1])
            if turn == 0:
                loaded.clear()  # Rates are not known before it.
                phases.of_prompts.clear()
                bench.clock.rates.clear()
                before = bench.num_from_store
    share = (bench.num_from_store - before) / (len(loaded) * plan.prefix)
    return {
        "prefix tokens": plan.prefix,
        "first token, ms": {"computed": distribution(computed), "store": distribution(loaded)},
        "of that, p50 in ms": phases.figures(),
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


def main() -> None:
    parser = parse(__doc__, "store_tier")
    parser.add_argument("--prompts", type=int, default=6, help="of their own prefix each")
    parser.add_argument("--keepers", type=int, default=4, help="processes that lend memory")
    parser.add_argument("--query", default="", help="of the store's URL, such as protocol=rdma")
    args = parser.parse_args()
    shape, plan, config = plan_of(args, prompts=1 + args.prompts, rows=1)
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
