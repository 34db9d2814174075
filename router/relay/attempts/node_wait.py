"""Waits for a decode node to come back, as long as one request may.

1. pause    until something changes about the nodes, or for a moment that grows from pause to
            pause, because a node may get room without any news
2. look     each request that waits tries all nodes again; back to 1
-  over     the time is used up
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from router.nodes.registry import NodeRegistry

_MAX_PAUSE_S = 1.0
_LOOK_S = 0.05
_JITTER = 0.2


@dataclass(slots=True)
class NodeWait:
    """Waits until `deadline`, in monotonic seconds."""

    registry: NodeRegistry
    deadline: float
    rng: random.Random
    _pause_s: float = 0.05

    async def pause(self) -> bool:
        """Returns whether there was any time left to wait."""
        now = time.monotonic()
        if now >= self.deadline:
            return False
        version = self.registry.version
        pause_s = self._pause_s * self.rng.uniform(1 - _JITTER, 1 + _JITTER)
        until = min(now + pause_s, self.deadline)
        while self.registry.version == version:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, _LOOK_S))
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        return True
