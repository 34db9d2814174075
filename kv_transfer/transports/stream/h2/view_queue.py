"""Memory that is filled from the front."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

_MAX_VIEWS = 256
"""One system call takes no more."""


class ViewQueue:
    """Holds pieces of memory in the order in which they are filled."""

    def __init__(self, views: Iterable[memoryview] = ()) -> None:
        self._views = deque(views)

    def extend(self, views: Iterable[memoryview]) -> None:
        self._views.extend(views)

    def clear(self) -> None:
        self._views.clear()

    def first(self, num_bytes: int) -> list[memoryview]:
        """Returns the first `num_bytes`, or as many as one system call takes."""
        found: list[memoryview] = []
        for view in islice(self._views, _MAX_VIEWS):
            if num_bytes == 0:
                break
            found.append(view[:num_bytes])
            num_bytes -= len(found[-1])
        return found

    def drop(self, num_bytes: int) -> None:
        """Drops the first `num_bytes`: they are filled."""
        while num_bytes:
            view = self._views.popleft()
            if len(view) > num_bytes:
                self._views.appendleft(view[num_bytes:])
                return
            num_bytes -= len(view)
