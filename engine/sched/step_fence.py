"""Blocks that were given up while a step that may write them is on its way.

    1. `issue`: a step goes out
    2. `release`: a request leaves its blocks; free at once only when no step is out
    3. `retire`: a step's result is here; blocks that only it held back become free

Compute is ordered on one stream and would be safe without this. Transfers are not: a freed block
could be filled from a peer while an older step still writes into it.
"""

from __future__ import annotations

from collections import deque

from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.kv_cache_manager import KVCacheManager


class StepFence:
    """Stands between the scheduler and the pool."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._issued = self._retired = -1  # The first step is 0.
        self._waiting: deque[tuple[int, list[KVCacheBlock]]] = deque()
        """Pairs (step that must retire first, blocks), steps rising."""
        self.num_blocks = 0
        """Blocks that wait, counted once for each user that left."""

    def issue(self, step_id: int) -> None:
        self._issued = step_id

    def release(self, blocks: list[KVCacheBlock]) -> None:
        """Frees `blocks`, given in the order of the tokens, once no step reads them."""
        if self._issued == self._retired:
            self._kv_cache.free_blocks(blocks)
        elif blocks:
            self._waiting.append((self._issued, blocks))
            self.num_blocks += len(blocks)

    def retire(self, step_id: int) -> None:
        self._retired = step_id
        while self._waiting and self._waiting[0][0] <= step_id:
            blocks = self._waiting.popleft()[1]
            self.num_blocks -= len(blocks)
            self._kv_cache.free_blocks(blocks)

    def waiting_blocks(self) -> list[KVCacheBlock]:
        return [block for _, blocks in self._waiting for block in blocks]
