"""Waits for what happens in another task or process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_TIMEOUT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)
