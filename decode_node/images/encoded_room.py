"""Bounds the memory of images and videos that are here, encoded, and not decoded yet.

A request may name videos of hundreds of megabytes in a few bytes of text, and many may come while
decoders are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from decode_node.errors import Overloaded

MOST_BYTES = 2 << 30
"""As many as waiting images of the largest size that is usual take."""

Hold = Callable[[int], None]
"""Counts bytes more. Raises `Overloaded` where there is no room for them."""


class EncodedRoom:
    """Counts those of all requests of a node, in one event loop."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Yields what counts the bytes of one image or video; it holds them while this is open."""
        mine = 0

        def hold(num_bytes: int) -> None:
            nonlocal mine
            if self.num_bytes + num_bytes > self._most_bytes:
                raise Overloaded("too many images and videos at once; try it again in a moment")
            self.num_bytes += num_bytes
            mine += num_bytes

        try:
            yield hold
        finally:
            self.num_bytes -= mine
