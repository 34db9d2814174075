"""Tells which tier of this node holds a block, by its hash: the one place to ask."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.block_pool import BlockPool
from kv_transfer.base import HostTier
from kv_transfer.tier import Tier


class BlockTiers:
    """Looks into the cache first, then into what lies behind it. Looking counts as no use."""

    def __init__(self, cache: BlockPool, behind: HostTier | None) -> None:
        self._cache = cache
        self._behind = behind

    def tier_of(self, name: BlockHash) -> Tier | None:
        """Returns the quickest tier that holds the block; None: this node lacks it."""
        if self._cache.get_cached_block(name) is not None:
            return Tier.GPU
        return self._behind.tier_of(name) if self._behind is not None else None

    def num_held(self, names: Sequence[BlockHash]) -> int:
        """Returns how many of these blocks, from the first on, are here without a gap."""
        for count, name in enumerate(names):
            if self.tier_of(name) is None:
                return count
        return len(names)
