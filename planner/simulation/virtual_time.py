"""Keeps virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualTime:
    """Holds events; those of one moment happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Adds an event; one of the past happens now."""
        heapq.heappush(self._events, (max(when, self.now), next(self._serial), action))

    def step(self) -> None:
        """Lets the next event happen. There is one."""
        self.now, _, action = heapq.heappop(self._events)
        action()
