"""Threads that take the rest of large messages from the kernel, and check it.

    1. `receive(...)`   fills memory piece by piece; the sink is called for each piece while it is
                        in the processor's cache
    2. `done`           on the event loop: all of it has come, or no more for now, or why not
    3. `give_up`        nothing wants it any more: after the piece at hand `done` is called. Until
                        then the memory is still written to

A thread waits for more, since what follows is mostly there before the event loop could say so; but
only for a moment, so that a slow peer keeps no thread from the others. The connection's state is
the event loop's alone.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edge.h2.io_threads import IoThreads
from edge.h2.send_threads import Connection
from edge.h2.tls_socket import TLS_AHEAD_BYTES, TlsSocket
from kv_transfer.transports.stream.h2.view_queue import ViewQueue

WORTH_BYTES = 64 << 10
"""The event loop is quicker with less."""
_PIECE_BYTES = 1 << 20
_LOW_WATER_BYTES = 256 << 10
_PATIENCE_MS = 1


class Received(NamedTuple):
    """Counts what has come: bytes that were asked for, and bytes behind them."""

    num_bytes: int
    num_ahead: int


class LowWater:
    """Lets a socket count as readable only when enough has come that reading it is worth it: few
    large reads cost much less than many small ones."""

    def __init__(self, sock: Connection) -> None:
        self._socket = sock
        self._ahead = TLS_AHEAD_BYTES if isinstance(sock, TlsSocket) else 0
        self._num_bytes = 1

    def wait_for(self, sure: int) -> None:
        """Waits for no more than `sure`: bytes that will come, because they are the rest of what
        has begun. Some of them may have left the kernel."""
        num_bytes = max(1, min(sure, _LOW_WATER_BYTES) - self._ahead)
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


class Reading:
    """One job: `views` are filled, then `ahead` as far as it goes. `fill` is called for each
    piece."""

    def __init__(
        self,
        sock: Connection,
        low_water: LowWater,
        views: Sequence[memoryview],
        ahead: memoryview,
        fill: Callable[[memoryview], None],
    ) -> None:
        self._socket = sock
        self._low_water = low_water
        self._views = ViewQueue(views)
        self._left = sum(len(view) for view in views)
        self._ahead = ahead
        self._fill = fill
        self._is_given_up = False

    def give_up(self) -> None:
        self._is_given_up = True

    def run(self) -> Received | Exception:
        """Reads until all of it has come, or nothing more comes for a moment."""
        wanted = self._left
        num_ahead = 0
        try:
            while self._left and not self._is_given_up:
                try:
                    num_ahead = self._read_piece()
                except (BlockingIOError, InterruptedError):
                    if not self._has_more_soon():
                        break
        except Exception as error:
            return error
        return Received(wanted - self._left, num_ahead)

    def _read_piece(self) -> int:
        """Returns the bytes that came behind the last piece."""
        views = self._views.first(min(self._left, _PIECE_BYTES))
        size = sum(len(view) for view in views)
        room = [*views, self._ahead] if size == self._left else views
        count = self._socket.recvmsg_into(room)[0]
        if count == 0:
            raise ConnectionError("closed by it")
        num_new = min(count, size)
        for view in self._views.first(num_new):
            self._fill(view)
        self._views.drop(num_new)
        self._left -= num_new
        return count - num_new

    def _has_more_soon(self) -> bool:
        self._low_water.wait_for(self._left)
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(_PATIENCE_MS))


class ReceiveThreads:
    """Without any, everything is left to the event loop; with them, less than `worth_bytes`."""

    def __init__(self, num_threads: int, worth_bytes: int | None = None) -> None:
        least = WORTH_BYTES if worth_bytes is None else worth_bytes
        self.worth_bytes = least if num_threads else sys.maxsize
        self._threads = IoThreads("kv-receive", num_threads)

    def receive(
        self,
        reading: Reading,
        done: Callable[[Received | Exception], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """The socket must stay open until `done` is called on `loop`."""
        self._threads.do(reading.run, done, loop)

    def close(self) -> None:
        """Closes when the jobs that were given are done."""
        self._threads.close()
