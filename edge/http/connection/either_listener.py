"""Accepts HTTP with and without TLS on one port, for the time in which clients learn TLS.

1. accepted   nothing reads yet. The first byte has `handshake_timeout_s` to come, and TLS as long
              to be agreed on
2. served     by a protocol, as any other connection
-  too many wait for their first byte or in a handshake: the oldest is closed
3. `close`    no new ones; those that wait are closed
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from edge.acceptor import Acceptor
from edge.security.server_tls import ServerTls, begins_with_tls

logger = logging.getLogger(__name__)

_MAX_UNDECIDED = 1024


class EitherListener:
    """Has the parts of `asyncio.Server` that uvicorn uses. `listener` listens already; its maker
    closes it."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ServerTls,
        new_protocol: Callable[[], asyncio.Protocol],
        handshake_timeout_s: float,
    ) -> None:
        assert tls.count_plaintext is not None
        self._tls = tls.context
        self._count_plaintext = tls.count_plaintext
        self._new_protocol = new_protocol
        self._timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._undecided: dict[asyncio.Task[None], None] = {}
        """Begins with the oldest."""
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
        if len(self._undecided) > _MAX_UNDECIDED:
            next(iter(self._undecided)).cancel()

    async def _serve(self, sock: socket.socket) -> None:
        try:
            is_tls = await self._begins_with_tls(sock)
            if not is_tls:
                self._count_plaintext()
            await self._loop.connect_accepted_socket(
                self._new_protocol,
                sock,
                ssl=self._tls if is_tls else None,
                ssl_handshake_timeout=self._timeout_s if is_tls else None,
            )
        except OSError as error:
            logger.debug("a client was refused: %s", error)

    async def _begins_with_tls(self, sock: socket.socket) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await begins_with_tls(sock)
        except BaseException:
            sock.close()
            raise
