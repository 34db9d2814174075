"""Blocks without a request that are still written, or read.

1. `hold`: a request ended, or went on without these blocks, while its KV was in motion; or a prefix
   of the cache goes out by itself: to a peer, or to host memory
2. `release`: they have no writer or reader any more
"""

from __future__ import annotations

from engine.kv_cache.block import KVCacheBlock
from engine.sched.step_fence import StepFence


class HeldBlocks:
    """Keeps them by transfer id, or by job of the host tier. A step may touch them as well, so they
    leave through the fence."""

    def __init__(self, fence: StepFence) -> None:
        self._fence = fence
        self._held: dict[str | int, list[KVCacheBlock]] = {}

    @property
    def num_transfers(self) -> int:
        return sum(isinstance(key, str) for key in self._held)

    def hold(self, key: str | int, blocks: list[KVCacheBlock]) -> None:
        # An older attempt of the same transfer may hold blocks too; they go together.
        self._held.setdefault(key, []).extend(blocks)

    def release(self, key: str | int) -> None:
        """Releases what is held by `key`; one that holds nothing is left alone."""
        blocks = self._held.pop(key, None)
        if blocks is not None:
            self._fence.release(blocks)

    def take(self, key: str | int) -> list[KVCacheBlock]:
        """Returns the blocks, which are the caller's now."""
        return self._held.pop(key)

    def blocks(self) -> list[KVCacheBlock]:
        return [block for blocks in self._held.values() for block in blocks]

    def leftovers(self) -> list[str]:
        return [
            f"blocks held by {'transfer' if isinstance(key, str) else 'job'} {key}"
            for key in self._held
        ]
