"""Counts open requests and waits until none is left, as draining a node needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


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
