"""Blocks without a request that are still written, or read.

1. `hold`: a request ended, or went on without these blocks, while its KV was in motion; or a prefix
   of the cache goes out by itself: to a peer, or to host memory
2. `release`: they have no writer or reader any more
"""

from __future__ import annotations

from engine.kv_cache.block import KVCacheBlock
from engine.sched.step_fence import StepFence
from kv_transfer.metadata import TransferName


class HeldBlocks:
    """Keeps them by attempt of a transfer, or by job of the host tier. A step may touch them as
    well, so they leave through the fence."""

    def __init__(self, fence: StepFence) -> None:
        self._fence = fence
        self._held: dict[TransferName | int, list[KVCacheBlock]] = {}

    @property
    def num_transfers(self) -> int:
        return sum(not isinstance(key, int) for key in self._held)

    def hold(self, key: TransferName | int, blocks: list[KVCacheBlock]) -> None:
        self._held.setdefault(key, []).extend(blocks)

    def pass_on(self, name: TransferName) -> None:
        """Holds by this attempt what earlier ones of its transfer hold: it replaces them, so their
        end is not reported."""
        earlier = [
            key
            for key in self._held
            if not isinstance(key, int) and key.transfer_id == name.transfer_id
        ]
        for key in earlier:
            self.hold(name, self._held.pop(key))

    def release(self, key: TransferName | int) -> None:
        """Releases what is held by `key`; one that holds nothing is left alone."""
        blocks = self._held.pop(key, None)
        if blocks is not None:
            self._fence.release(blocks)

    def take(self, key: TransferName | int) -> list[KVCacheBlock]:
        """Returns the blocks, which are the caller's now."""
        return self._held.pop(key)

    def blocks(self) -> list[KVCacheBlock]:
        return [block for blocks in self._held.values() for block in blocks]

    def leftovers(self) -> list[str]:
        return [
            f"blocks held by job {key}" if isinstance(key, int) else f"blocks held by {key}"
            for key in self._held
        ]
