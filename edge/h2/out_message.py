"""One message of a call on its way out, in parts that are not copied.

    1. made of parts: staged memory, or blocks of the KV cache themselves
    2. the connection cuts it into frames; a sending thread reads the parts while it sends
    3. `replace` puts a copy in the place of the parts while some of it is unsent
    4. the end: `sent`, or `dropped` because its call or its connection has ended

Everything but the reading itself happens on the event loop. The owner of the parts may change
them once `when_unread` has called back after 3 or 4.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct(">BI")
"""gRPC: not compressed, bytes that follow."""


class OutMessage:
    """`on_end(whether all of it was sent)` is called once, when no part is read any more.

    `complete` is called before the parts are first read, by their reader, perhaps twice: it
    writes what depends on the other parts, like a checksum. The sender of the bytes should also
    compute it, because then they lie in his cache.
    """

    __slots__ = (
        "_complete",
        "_on_end",
        "_parts",
        "_prefix",
        "_readers",
        "_waiting",
        "num_bytes",
    )

    def __init__(
        self,
        parts: Sequence[Buffer],
        on_end: Callable[[bool], None] = lambda is_sent: None,
        complete: Callable[[], None] | None = None,
    ) -> None:
        self._parts = parts
        self.num_bytes = sum(len(part) for part in parts)
        self._prefix = _PREFIX.pack(0, self.num_bytes)
        self._complete = complete
        self._on_end: Callable[[bool], None] | None = on_end
        self._readers = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def num_wire_bytes(self) -> int:
        """Counts gRPC's prefix too."""
        return _PREFIX.size + self.num_bytes

    def complete(self) -> None:
        """Completes the message before `slices` are read. Any thread may call it."""
        complete = self._complete
        if complete is not None:
            complete()
            self._complete = None

    def joined(self) -> bytes:
        """Returns a copy without the prefix, unless it is one `bytes` already."""
        self.complete()
        if len(self._parts) == 1 and isinstance(self._parts[0], bytes):
            return self._parts[0]
        return b"".join(self._parts)

    def replace(self, copy: Buffer) -> None:
        """Reads from the copy from now on. A thread that reads goes on with the parts."""
        self._parts = (copy,)

    def slices(self, start: int, stop: int) -> Iterator[Buffer]:
        """Yields bytes [start, stop) of what goes over the wire."""
        at = 0
        for part in (self._prefix, *self._parts):
            first, last = max(start - at, 0), min(stop - at, len(part))
            if first < last:
                yield part if (first, last) == (0, len(part)) else memoryview(part)[first:last]
            at += len(part)
            if at >= stop:
                return

    def begin_read(self) -> None:
        self._readers += 1

    def end_read(self) -> None:
        self._readers -= 1
        if self._readers == 0:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def when_unread(self, callback: Callable[[], None]) -> None:
        """Calls it at once, or when the thread that reads has ended."""
        if self._readers == 0:
            callback()
        else:
            self._waiting.append(callback)

    def sent(self) -> None:
        self._end(True)

    def dropped(self) -> None:
        """It will not be sent, or not all of it. What is in frames already goes out as zeros."""
        if self._on_end is not None:
            self._parts = (bytes(self.num_bytes),)
            self.when_unread(lambda: self._end(False))

    def _end(self, is_sent: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(is_sent)
