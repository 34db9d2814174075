"""Accepts the HTTP connections of one port, many in a turn of the event loop.

The server of uvloop accepts one in a turn. Where turns are long, as with many answers or on a busy
host, clients would then wait in the kernel, for seconds and beyond all limits: nothing could refuse
them, and no deadline of theirs would run.

1. accepted   by `edge.acceptor`
2. served     by a protocol; with TLS once that is agreed on, for which there is a time
3. `close`    no new ones; those that wait are closed

For the time in which clients learn TLS, one port has both (`EitherListener`): nothing reads until
the first byte is here, which has as long to come. If too many wait for that or in a handshake, the
oldest is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from edge.acceptor import Acceptor
from edge.security.server_tls import ServerTls, begins_with_tls

logger = logging.getLogger(__name__)

_MAX_UNDECIDED = 1024


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


class EitherListener(HttpListener):
    """Accepts HTTP with and without TLS on one port."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ServerTls,
        new_protocol: Callable[[], asyncio.Protocol],
        handshake_timeout_s: float,
    ) -> None:
        assert tls.count_plaintext is not None
        self._count_plaintext = tls.count_plaintext
        super().__init__(listener, new_protocol, tls.context, handshake_timeout_s)

    def _take(self, sock: socket.socket, peer: str) -> None:
        super()._take(sock, peer)
        if len(self._undecided) > _MAX_UNDECIDED:
            next(iter(self._undecided)).cancel()

    async def _tls_of(self, sock: socket.socket) -> ssl.SSLContext | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                is_tls = await begins_with_tls(sock)
        except BaseException:
            sock.close()
            raise
        if is_tls:
            return self._context
        self._count_plaintext()
        return None
