"""Lets connections parse what they hold in turns, and other work in between.

1. `wait`   a connection holds more than it was given to parse at once
2. a turn   each that waits parses a piece, as long as `_TURN_S` lasts; then the event loop serves
            everybody else, and the next ones follow
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

_TURN_S = 0.005


class ParseTurns:
    """Is shared by the connections of one listener."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_set = False

    def wait(self, parse_on: Callable[[], None]) -> None:
        """Has `parse_on` called when it is its turn. It may ask for another one then."""
        self._waiting.append(parse_on)
        self._set()

    def _set(self) -> None:
        if not self._is_set:
            self._is_set = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_set = False
        until = time.monotonic() + _TURN_S
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()
            if time.monotonic() > until:
                break
        if self._waiting:
            self._set()


class HeldFlow(FlowControl):
    """Does not read from a client while something of what it sent is held, whoever asks for it."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
