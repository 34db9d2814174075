"""Sleep and waits that bear a standstill of this process: its host was paused or overloaded.

What peers said meanwhile lies unread in our sockets, so limits to their silence must not count it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any


async def sleep_and_see(seconds: float) -> float:
    """Sleeps, and returns by how many seconds too long. An event loop that has work makes some
    milliseconds of it."""
    slept_from = time.monotonic()
    await asyncio.sleep(seconds)
    return max(0.0, time.monotonic() - slept_from - seconds)


async def is_done_within(seconds: float, steps: int, future: asyncio.Future[Any]) -> bool:
    """Waits for a future, and returns whether it is done. It waits in `steps`, of which a
    standstill takes one: in the next, what came meanwhile is read."""
    for _ in range(steps):
        await asyncio.wait({future}, timeout=seconds / steps)
        if future.done():
            return True
    return False
