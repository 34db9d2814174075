"""Sleep that notices a standstill of this process: its host was paused or overloaded.

What peers said meanwhile lies unread in our sockets, so limits to their silence must not count it.
"""

from __future__ import annotations

import asyncio
import time


async def sleep_and_see(seconds: float) -> float:
    """Sleeps, and returns by how many seconds too long. An event loop that has work makes some
    milliseconds of it."""
    slept_from = time.monotonic()
    await asyncio.sleep(seconds)
    return max(0.0, time.monotonic() - slept_from - seconds)
