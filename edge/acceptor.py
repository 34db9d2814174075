"""Accepts the connections of a listening socket on the event loop.

1. `take` gets each connection, which does not block and sends at once
2. no descriptor is left: nothing is accepted for a moment
3. `close`: nothing any more

A connection that cannot be accepted stays readable: without 2 the loop would call again and again,
and take a whole processor from those that it has.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_AT_ONCE = 64
_PAUSE_S = 1.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process or a host that has no room for another socket."""


class Acceptor:
    """`listener` listens already; its maker closes it. `take` also gets the host of the peer.
    Lives on the event loop on which it was made."""

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket, str], None]) -> None:
        self._listener = listener
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Comes before the listener is closed."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            for _ in range(_AT_ONCE):
                sock, peer = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._take(sock, peer[0])
        except OSError as error:
            # A peer that has gone again is no reason to stop.
            if error.errno in EXHAUSTED:
                logger.error("no connection can be accepted for %g s: %s", _PAUSE_S, error)
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(_PAUSE_S, self._listen)
