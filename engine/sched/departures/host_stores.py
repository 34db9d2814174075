"""KV that goes to host memory: full blocks are copied there while they are in the cache.

offered    the block is full and certain
storing    held while it is copied
stored     the cache may forget it (`HostSource` brings it back)
"""

from __future__ import annotations

from collections import deque

from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.departures.held_blocks import HeldBlocks
from kv_transfer.base import HostTier

_SHARE_HELD = 8
"""At most one block in this many is held to be stored: requests come first."""


class HostStores:
    """Without a `tier` it never has anything to do."""

    def __init__(self, tier: HostTier | None, kv_cache: KVCacheManager, held: HeldBlocks) -> None:
        self._tier = tier
        self._kv_cache = kv_cache
        self._held = held
        self._offered: deque[tuple[KVCacheBlock, BlockHash]] = deque(maxlen=kv_cache.num_blocks)
        self._storing: dict[int, int] = {}
        """Counts blocks by job."""
        if tier is not None:
            kv_cache.block_pool.on_cached = self._offer

    def _offer(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        self._offered.append((block, block.block_hash))

    def store_offered(self) -> None:
        """Begins to store what was offered and is still in its block, as much as may be held."""
        if self._tier is None or not self._offered:
            return
        pool = self._kv_cache.block_pool
        room = max(1, pool.num_blocks // _SHARE_HELD) - sum(self._storing.values())
        chosen: dict[BlockHash, KVCacheBlock] = {}
        while self._offered and len(chosen) < room:
            block, name = self._offered.popleft()
            # Equal prompts that are computed together give a block each.
            if block.block_hash == name and name not in self._tier and name not in chosen:
                chosen[name] = block
        named = [(name, block.block_id) for name, block in chosen.items()]
        begun = self._tier.store(named) if named else None
        if begun is None:
            return
        job, count = begun
        blocks = list(chosen.values())[:count]
        pool.touch(blocks)
        self._held.hold(job, blocks)
        self._storing[job] = count

    def jobs_done(self, jobs: dict[int, bool]) -> None:
        """Goes on after jobs of the tier; those of others are left alone."""
        for job in jobs:
            if self._storing.pop(job, None) is not None:
                self._kv_cache.free_blocks(self._held.take(job))

    def forget(self) -> None:
        """Forgets what was to go to host memory."""
        self._offered.clear()
