"""Reads from all connections of a listener through one buffer, so that each read is bounded, and
all of them together.

    there is room   reads of `_READ_BYTES`. A quarter of a megabyte from each of a hundred
                    connections, parsed piece by piece, would be 25 MB that lie here for nothing:
                    the kernel keeps what is not read, and slows down who sends
    there is none   `_ROOM_BYTES` are read and not parsed: reads of `LEAST_BYTES`, what is parsed at
                    once. A client that hangs up while data of it is on the way looks open until
                    that was read, so there may be any number of connections of such clients

The buffer is shared, because what a read brought is copied out of it at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

_READ_BYTES = 32 << 10
LEAST_BYTES = 4 << 10
_ROOM_BYTES = 4 << 20


class ReadRoom:
    """Is shared by the connections of one listener. `num_held` bytes were read and are kept until
    they are parsed: who keeps them counts."""

    def __init__(self) -> None:
        self._large = memoryview(bytearray(_READ_BYTES))
        self._small = self._large[:LEAST_BYTES]
        self.num_held = 0

    def buffer(self) -> memoryview:
        """Returns what the next read fills."""
        return self._large if self.num_held < _ROOM_BYTES else self._small


class BoundedReads(asyncio.BufferedProtocol):
    """Hands what is read to `protocol`, of which it has all the other parts."""

    def __init__(self, protocol: asyncio.Protocol, room: ReadRoom) -> None:
        self._protocol = protocol
        self._room = room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = self._room.buffer()
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def bounded(kind: type[asyncio.Protocol], room: ReadRoom) -> type[asyncio.Protocol]:
    """Returns what makes protocols of this kind, for the connections of one listener. It is no
    class, but servers only call it."""

    def make(*args: Any, **given: Any) -> BoundedReads:
        return BoundedReads(kind(*args, **given), room)

    return cast("type[asyncio.Protocol]", make)
