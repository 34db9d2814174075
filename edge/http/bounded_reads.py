"""Reads from all connections of a listener through one buffer, so that each read is bounded.

Reads of a quarter of a megabyte from each of a hundred connections, parsed piece by piece, are
25 MB that lie here for nothing: the kernel keeps what is not read, and slows down who sends. The
buffer is shared, because what a read brought is copied out of it at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

_READ_BYTES = 32 << 10


class BoundedReads(asyncio.BufferedProtocol):
    """Hands what is read to `protocol`, of which it has all the other parts."""

    def __init__(self, protocol: asyncio.Protocol, buffer: memoryview) -> None:
        self._protocol = protocol
        self._buffer = buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def bounded(kind: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Returns what makes protocols of this kind, for the connections of one listener. It is no
    class, but servers only call it."""
    buffer = memoryview(bytearray(_READ_BYTES))

    def make(*args: Any, **given: Any) -> BoundedReads:
        return BoundedReads(kind(*args, **given), buffer)

    return cast("type[asyncio.Protocol]", make)
