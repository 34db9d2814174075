"""Shares decoders between requests, of which one may have many slow images.

1. line      one for each request, while it has images to decode
2. waiting   an image of it wants a decoder
3. turn      a decoder is free: the line has it that had the fewest so far. A line leaves the last
             free one to others, unless its images have been quick until then
4. done      the next that waits has the decoder
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_QUICK_S = 0.3
"""Seconds that others wait without harm."""


@dataclass(eq=False, slots=True)
class ImageLine:
    """Holds what of one request waits. `slowest_s`: None until an image of it is done.
    `has_videos`: some of its images are videos."""

    has_videos: bool = False
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    num_running: int = 0
    num_given: int = 0
    slowest_s: float | None = None

    def is_quick(self) -> bool:
        return self.slowest_s is not None and self.slowest_s <= _QUICK_S


class ImageTurns:
    """Is used in one event loop. `size`: decoders."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_free = size
        self._num_for_videos = 0
        self._lines: list[ImageLine] = []

    async def wait(self, line: ImageLine) -> Callable[[], None]:
        """Returns when a decoder is free, which is to be given back by calling what is returned."""
        turn = asyncio.get_running_loop().create_future()
        line.waiting.append(turn)
        if line not in self._lines:
            self._lines.append(line)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(line)
            raise
        began = time.monotonic()

        def end() -> None:
            line.slowest_s = max(line.slowest_s or 0.0, time.monotonic() - began)
            self._end(line)

        return end

    def _end(self, line: ImageLine) -> None:
        self._num_free += 1
        line.num_running -= 1
        self._num_for_videos -= line.has_videos
        self._give()

    def _give(self) -> None:
        """Gives what is free to lines that may have one, those first that had the fewest."""
        while self._num_free:
            for line in [*self._lines]:
                while line.waiting and line.waiting[0].done():
                    line.waiting.popleft()
                if not line.waiting:
                    self._lines.remove(line)
            able = [line for line in self._lines if self._may_have_one(line)]
            if not able:
                return
            line = min(able, key=lambda line: line.num_given)
            self._num_free -= 1
            line.num_running += 1
            self._num_for_videos += line.has_videos
            line.num_given += 1
            line.waiting.popleft().set_result(None)

    def _may_have_one(self, line: ImageLine) -> bool:
        if line.has_videos and self._num_for_videos >= self._size - 1 > 0:
            return False
        is_last = line.num_running >= self._size - 1 > 0
        return line.is_quick() or not is_last
