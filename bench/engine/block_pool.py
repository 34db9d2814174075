"""Measures a block of the KV cache on its way through the pool, with and without the sample of
`--kv-cache-metrics`.

    python -m bench.engine.block_pool

Prints nanoseconds a block for a whole round (taken, cached, found again, freed twice), the best of
several repeats of each, taken in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.sampled_pool import SampledBlockPool

NUM_BLOCKS = 20_000
BLOCKS_AT_ONCE = 16
REPEATS = 15

POOLS: dict[str, Callable[[], BlockPool]] = {
    "off": lambda: BlockPool(NUM_BLOCKS, enable_caching=True),
    "sample 0.01": lambda: SampledBlockPool(NUM_BLOCKS, True, 0.01),
    "sample 1": lambda: SampledBlockPool(NUM_BLOCKS, True, 1.0),
}


def round_ns(pool: BlockPool, turn: int) -> float:
    """Sends all blocks of the pool through it and returns nanoseconds a block."""
    names = [turn.to_bytes(8, "little") + i.to_bytes(24, "little") for i in range(NUM_BLOCKS)]
    started = time.perf_counter_ns()
    for first in range(0, NUM_BLOCKS, BLOCKS_AT_ONCE):
        blocks = pool.get_new_blocks(BLOCKS_AT_ONCE)
        pool.cache_full_blocks(blocks, names[first : first + BLOCKS_AT_ONCE])
        pool.free_blocks(reversed(blocks))
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))
    return (time.perf_counter_ns() - started) / NUM_BLOCKS


def main() -> None:
    pools = {name: create() for name, create in POOLS.items()}
    best = dict.fromkeys(pools, float("inf"))
    for turn in range(REPEATS):
        for name, pool in pools.items():
            best[name] = min(best[name], round_ns(pool, turn))
    for name, nanoseconds in best.items():
        print(f"{name:12} {nanoseconds:7.0f} ns a block")


if __name__ == "__main__":
    main()
