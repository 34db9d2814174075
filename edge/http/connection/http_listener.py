"""Accepts the HTTP connections of one port, many in a turn of the event loop.

The server of uvloop accepts one in a turn. Where turns are long, as with many answers or on a busy
host, clients would then wait in the kernel, for seconds and beyond all limits: nothing could refuse
them, and no deadline of theirs would run.

1. accepted   by `edge.acceptor`
2. served     by a protocol; with TLS once that is agreed on, for which there is a time
3. `close`    no new ones; those that wait are closed
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from edge.acceptor import Acceptor

logger = logging.getLogger(__name__)


class HttpListener:
    """Has the parts of `asyncio.Server` that uvicorn uses. `listener` listens already; its maker
    closes it. `tls` is None for plain HTTP."""

    def __init__(
        self,
        listener: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._new_protocol = new_protocol
        self._context = tls
        self._timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._undecided: dict[asyncio.Task[None], None] = {}
        """Serve connections that have no protocol yet. Begins with the oldest."""
        self._acceptor = Acceptor(listener, self._take)

    def close(self) -> None:
        self._acceptor.close()
        for task in self._undecided:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._undecided, return_exceptions=True)

    def _take(self, sock: socket.socket, peer: str) -> None:
        task = self._loop.create_task(self._serve(sock))
        self._undecided[task] = None
        task.add_done_callback(lambda done: self._undecided.pop(done, None))

    async def _serve(self, sock: socket.socket) -> None:
        try:
            tls = await self._tls_of(sock)
            await self._loop.connect_accepted_socket(
                self._new_protocol,
                sock,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else self._timeout_s,
            )
        except OSError as error:
            logger.debug("a client was refused: %s", error)

    async def _tls_of(self, sock: socket.socket) -> ssl.SSLContext | None:
        """Returns what a connection is served with. Raises OSError."""
        return self._context
