"""A TLS connection with those calls of a plain socket that our HTTP/2 ends make.

    1. `TlsSocket.accept` or `TlsSocket.connect`: the handshake, on the event loop
    2. calls move what can be moved and never wait. Reading and writing may happen on two threads:
       they take turns, one TLS record or a few at a time
    3. `close`

A record that the kernel had no room for is finished before anything else: it is kept until then,
since what it was made of may have changed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from edge.h2.out_message import Buffer

_RECORD_BYTES = 16 << 10
TLS_AHEAD_BYTES = _RECORD_BYTES + 512
"""At most this much of a record that is not complete has left the kernel."""
_PIECE_BYTES = 64 << 10
"""Encrypted in one go, without Python's lock."""
_SMALL_BYTES = 4 << 10
"""Joined with its neighbours, so that it needs no record of its own."""
HANDSHAKE_S = 10.0

_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsSocket:
    """Owns `tls`, whose handshake is over and which does not block."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._unfinished = b""

    @classmethod
    async def accept(cls, sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
        """Takes over `sock`. Raises OSError, ssl.SSLError among them, or TimeoutError."""
        return await cls._shake_hands(
            context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        )

    @classmethod
    async def connect(cls, sock: socket.socket, context: ssl.SSLContext, name: str) -> TlsSocket:
        """Takes over `sock`, to the server that its certificate must call `name`. Raises as
        `accept` does."""
        return await cls._shake_hands(
            context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        )

    @classmethod
    async def _shake_hands(cls, tls: ssl.SSLSocket) -> TlsSocket:
        loop, fd = asyncio.get_running_loop(), tls.fileno()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                while True:
                    try:
                        tls.do_handshake()
                        return cls(tls)
                    except ssl.SSLWantReadError:
                        await _called_back(loop.add_reader, loop.remove_reader, fd)
                    except ssl.SSLWantWriteError:
                        await _called_back(loop.add_writer, loop.remove_writer, fd)
        except BaseException:
            tls.close()
            raise

    @property
    def peer_certificate(self) -> object:
        """Returns what `ssl.SSLSocket.getpeercert` tells."""
        return self._tls.getpeercert()

    @property
    def has_read_ahead(self) -> bool:
        """Returns whether bytes have arrived that the kernel will not announce again."""
        return self._tls.pending() > 0

    def fileno(self) -> int:
        return self._tls.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._tls.setsockopt(level, option, value)

    def close(self) -> None:
        self._tls.close()

    # Reading ----------------------------------------------------------------------------------

    def recv(self, num_bytes: int) -> bytes:
        """Returns at most one record; b"" at the end. Raises BlockingIOError."""
        with self._lock:
            try:
                return self._tls.recv(num_bytes)
            except _NOT_NOW:
                raise BlockingIOError from None

    def recvmsg_into(self, views: Iterable[memoryview]) -> tuple[int]:
        """Fills them in turn, as far as it goes; 0 at the end. Raises BlockingIOError."""
        total = 0
        for view in views:
            rest = view
            while len(rest):
                count = self._recv_into(rest)
                if count < 0 and total == 0:
                    raise BlockingIOError
                if count <= 0:
                    return (total,)
                total += count
                rest = rest[count:]
        return (total,)

    def _recv_into(self, view: memoryview) -> int:
        """Returns -1 when nothing is there now."""
        with self._lock:
            try:
                return self._tls.recv_into(view)
            except _NOT_NOW:
                return -1

    # Writing ----------------------------------------------------------------------------------

    def send(self, data: bytes) -> int:
        """Sends what fits now and returns how much that was. Raises BlockingIOError."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Sends as much as there is room for. What was not taken must come again, as the first.

        Raises BlockingIOError.
        """
        total = len(self._unfinished)
        if total and not self._send(self._unfinished):
            raise BlockingIOError
        self._unfinished = b""
        for piece in _pieces(buffers, total):
            if not self._send(piece):
                self._unfinished = bytes(piece)
                break
            total += len(piece)
        if total == 0:
            raise BlockingIOError
        return total

    def _send(self, piece: Buffer) -> bool:
        """Sends all of it, or not."""
        with self._lock:
            try:
                self._tls.send(piece)
            except _NOT_NOW:
                return False
            return True


def _pieces(buffers: Iterable[Buffer], num_done: int) -> Iterator[Buffer]:
    """Yields them without their first `num_done` bytes; small ones joined, large ones cut."""
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)[num_done:]
        num_done = max(0, num_done - len(buffer))
        if joined or len(view) < _SMALL_BYTES:
            room = max(0, _RECORD_BYTES - len(joined))
            joined += view[:room]
            view = view[room:]
            if len(joined) < _RECORD_BYTES:
                continue
            yield joined
            joined = bytearray()
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]
    if joined:
        yield joined


async def _called_back(
    add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool], fd: int
) -> None:
    called = asyncio.Event()
    add(fd, called.set)
    try:
        await called.wait()
    finally:
        remove(fd)
