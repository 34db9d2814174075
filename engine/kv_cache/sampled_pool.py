"""Watches some blocks of the pool: how long they stay, lie idle, and wait until their reuse.

    taken: one of 1 / sample is watched ──▶ cached ⇄ touched: a reuse
                    │                         │
                    │                         └──▶ taken for something else: evicted
                    └──▶ freed without content, or the cache is reset: nothing is counted

What vLLM shows by `--kv-cache-metrics`, under its names. Two things differ: a reuse counts when it
happens, not when the block goes, so one that never goes is seen, too; and a block that a request
holds is not idle, however long ago it was taken.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable

from engine.contracts.outputs import ResidencyStats
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_pool import BlockPool


class _Watch:
    """CLOCK_MONOTONIC seconds of one block: when it was taken, and last used."""

    __slots__ = ("last_used_at", "taken_at")

    def __init__(self, now: float) -> None:
        self.taken_at = self.last_used_at = now


class SampledBlockPool(BlockPool):
    """A pool of which the part `sample` of all allocations, in (0, 1], is watched."""

    def __init__(self, num_blocks: int, enable_caching: bool, sample: float) -> None:
        super().__init__(num_blocks, enable_caching)
        self.stats = ResidencyStats()
        self._sample = sample
        self._watched: dict[int, _Watch] = {}
        """Watched blocks by id."""
        self._until_next = self._draw_gap() - 1
        """Allocations before the next one that is watched."""

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        blocks = super().get_new_blocks(count)
        self._until_next -= count
        while self._until_next < 0:
            self._watched[blocks[self._until_next].block_id] = _Watch(time.monotonic())
            self._until_next += self._draw_gap()
        return blocks

    def _draw_gap(self) -> int:
        """Returns how many allocations the next watched one is behind this one: the chance is the
        same for each, without a draw for each."""
        if self._sample >= 1:
            return 1
        return 1 + int(math.log(1 - random.random()) / math.log(1 - self._sample))

    def _take(self) -> KVCacheBlock:
        block = self.free_queue.popleft()
        watch = self._watched.pop(block.block_id, None) if self._watched else None
        if block.block_hash is not None:
            if watch is not None:
                self._evicted(watch)
            self._forget(block, block.block_hash)
        block.ref_cnt = 1
        return block

    def _evicted(self, watch: _Watch) -> None:
        now = time.monotonic()
        self.stats.lifetime.add(now - watch.taken_at)
        self.stats.idle_before_evict.add(now - watch.last_used_at)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        super().touch(blocks)
        for block in blocks if self._watched else ():
            watch = self._watched.get(block.block_id)
            if watch is not None:
                now = time.monotonic()
                self.stats.reuse_gap.add(now - watch.last_used_at)
                watch.last_used_at = now

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        super().free_blocks(blocks)
        for block in blocks if self._watched else ():
            watch = self._watched.get(block.block_id)
            if watch is not None:
                watch.last_used_at = time.monotonic()

    def reset_prefix_cache(self) -> bool:
        is_reset = super().reset_prefix_cache()
        if is_reset:
            self._watched.clear()
        return is_reset
