"""Tokenises very long texts one after the other: each takes some 140 bytes a character meanwhile.

1. `run`      with a text longer than `VERY_LONG`. At most `_MAX_WAITING` wait for their turn
2. its turn   the shortest goes first, so that none waits for the books of others
3. ended      the next one begins, also when the client has left: a thread cannot be stopped
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from decode_node.errors import Overloaded

VERY_LONG = 128 << 10
"""Characters. Of shorter ones there are as many at once as there are threads."""
_MAX_WAITING = 64


class LongTexts:
    """Is used in one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._num_asked = 0
        self._is_busy = False

    async def run(self, num_chars: int, work: Callable[[], list[int]]) -> list[int]:
        """Returns what `work` does with a text, in a thread. Raises `Overloaded`."""
        loop = asyncio.get_running_loop()
        if self._is_busy:
            if len(self._waiting) >= _MAX_WAITING:
                raise Overloaded("too many very long texts at once; try it again in a moment")
            turn = loop.create_future()
            self._num_asked += 1
            heapq.heappush(self._waiting, (num_chars, self._num_asked, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._is_busy = True
        working = loop.run_in_executor(None, work)
        working.add_done_callback(lambda done: self._next())
        return await asyncio.shield(working)

    def _next(self) -> None:
        self._is_busy = False
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._is_busy = True
                turn.set_result(None)
                return
