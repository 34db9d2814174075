"""Counts open requests and waits until none is left, as draining a node needs, and as its caches
do to be reset."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

_MIN_PAUSE_S = 0.01
_MAX_PAUSE_S = 0.25


class OpenRequests:
    """Counts requests: `enter` and `leave` are called once for each; `entered` does both."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    def enter(self) -> None:
        self._count += 1
        self._idle.clear()

    def leave(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until none is open. Returns False when some still are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def reset_when_idle(self, reset: Callable[[], Awaitable[bool]], within_s: float) -> bool:
        """Calls `reset` when none is open, and again as long as it returns False: steps and
        transfers may hold blocks a little longer than requests, and new requests come. Returns what
        it returned last, which is after `within_s` at most."""
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + within_s, _MIN_PAUSE_S
        while True:
            await self.wait_idle(until - loop.time())
            if await reset():
                return True
            left_s = until - loop.time()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
