"""The messages of the calls on one connection, as their bytes arrive.

    |prefix 5|head 64|rest ..................|prefix|head|...
     ^ `take`, copied  ^ `take`, or written to `rest(...)` by a socket and then `filled`

The sink says where the rest of each message belongs.
"""

from __future__ import annotations

import struct

from edge.h2 import frames as h2
from kv_transfer.transports.stream.h2.view_queue import ViewQueue
from kv_transfer.wire.pull_client import HEAD_BYTES, MessageSink

_MAX_MESSAGE_BYTES = 128 << 20
_PREFIX = struct.Struct(">BI")


class ArrivingMessages:
    """`sink` is that of the call; without one, nothing may come."""

    def __init__(self) -> None:
        self.sink: MessageSink | None = None
        self.num_left = 0
        """Bytes that the rest of a message still lacks."""
        self._head = bytearray()
        """Prefix and head of a message whose sink is not asked yet."""
        self._views = ViewQueue()
        """The rest of the message goes here."""

    @property
    def is_amid(self) -> bool:
        """Returns whether a message has begun and not ended."""
        return bool(self.num_left or self._head)

    def drop(self) -> None:
        """Forgets what has begun: it will not end."""
        self.num_left = 0
        self._head.clear()
        self._views.clear()

    def rest(self, num_bytes: int) -> list[memoryview]:
        """Returns where the next `num_bytes` of a rest go, as `ViewQueue.first` does."""
        return self._views.first(num_bytes)

    def take(self, data: memoryview) -> int:
        """Takes the first of these bytes, which are of messages, and returns how many it took: at
        least one. Raises `H2Error` for what is no message."""
        if self.num_left == 0:
            count = min(len(data), self._num_head_missing())
            self._head += data[:count]
            if self._num_head_missing() == 0:
                self._begin()
            return count
        count = 0
        for view in self.rest(min(len(data), self.num_left)):
            view[:] = data[count : count + len(view)]
            count += len(view)
        self.tell(count)
        self.filled(count)
        return count

    def tell(self, num_bytes: int) -> None:
        """Tells the sink that this many bytes are written."""
        for view in self.rest(num_bytes):
            if self.sink is not None:
                self.sink.fill(view)

    def filled(self, num_bytes: int) -> None:
        """This many bytes are written to where the rest goes, and the sink has learnt of them."""
        self.num_left -= num_bytes
        self._views.drop(num_bytes)
        if self.num_left == 0 and self.sink is not None:
            self.sink.end()

    def _num_head_missing(self) -> int:
        """Returns the bytes that prefix and head still lack."""
        missing = _PREFIX.size - len(self._head)
        if missing > 0:
            return missing
        is_compressed, length = _PREFIX.unpack_from(self._head)
        if is_compressed or not 0 < length <= _MAX_MESSAGE_BYTES:
            raise h2.H2Error(f"a message of {length} bytes, or a compressed one")
        return _PREFIX.size + int(min(length, HEAD_BYTES)) - len(self._head)

    def _begin(self) -> None:
        length: int = _PREFIX.unpack_from(self._head)[1]
        head = bytes(self._head[_PREFIX.size :])
        self._head.clear()
        if self.sink is None:
            return
        self.num_left = length - len(head)
        self._views.extend(self.sink.begin(head, length))
        if self.num_left == 0:
            self.sink.end()
