"""Accepts HTTP with and without TLS on one port, for the time in which clients learn TLS.

1. accepted   nothing reads yet. The first byte has `handshake_timeout_s` to come, and TLS as long
              to be agreed on
2. served     by a protocol, as any other connection
-  too many wait for their first byte or in a handshake: the oldest is closed
3. `close`    no new ones; those that wait are closed
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from edge.http.connection.http_listener import HttpListener
from edge.security.server_tls import ServerTls, begins_with_tls

_MAX_UNDECIDED = 1024


class EitherListener(HttpListener):
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
