"""Makes at once, and not too often, what many ask for: metrics, snapshots.

1. asked    the first caller begins a wait; all that come in it share what is made
2. made     behind it, so that nothing gets what is older than their question
3. rest     the next one begins no sooner than `_REST` times as long after it as it took, so that
            a client that asks again and again leaves most of the event loop to others;
            `_MOST_REST_S` is enough
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")

_REST = 4.0
_MOST_REST_S = 1.0


class SharedWork(Generic[Made]):
    """Shares what `make` returns, in one event loop."""

    def __init__(self, make: Callable[[], Awaitable[Made]]) -> None:
        self._make = make
        self._next: asyncio.Task[Made] | None = None
        self._one = asyncio.Lock()
        self._not_before = 0.0

    async def get(self) -> Made:
        """Returns what `make` makes after this call; raises what it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._make_later())
        return await asyncio.shield(self._next)

    async def _make_later(self) -> Made:
        async with self._one:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            self._next = None
            began = loop.time()
            try:
                return await self._make()
            finally:
                ended = loop.time()
                self._not_before = ended + min(_MOST_REST_S, _REST * (ended - began))
