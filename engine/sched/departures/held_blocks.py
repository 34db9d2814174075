"""Blocks without a request that a transfer still touches.

1. `hold`: a request ended, or went on without these blocks, while its KV was in motion
2. `release`: the connector says that nothing writes or reads them any more
"""

from __future__ import annotations

from engine.kv_cache.block import KVCacheBlock
from engine.sched.step_fence import StepFence


class HeldBlocks:
    """Keeps them by transfer id. A step may touch them as well, so they leave through the fence."""

    def __init__(self, fence: StepFence) -> None:
        self._fence = fence
        self._held: dict[str, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Transfers."""
        return len(self._held)

    def hold(self, transfer_id: str, blocks: list[KVCacheBlock]) -> None:
        # An older attempt of the same transfer may hold blocks too; they go together.
        self._held.setdefault(transfer_id, []).extend(blocks)

    def release(self, transfer_id: str) -> None:
        """Releases what the transfer holds; one that holds nothing is left alone."""
        blocks = self._held.pop(transfer_id, None)
        if blocks is not None:
            self._fence.release(blocks)

    def blocks(self) -> list[KVCacheBlock]:
        return [block for blocks in self._held.values() for block in blocks]

    def leftovers(self) -> list[str]:
        return [f"blocks held by transfer {name}" for name in self._held]
