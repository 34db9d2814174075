"""A gRPC server of our own for a few methods: any gRPC client can call it.

1. `listen`
2. connections (`H2ServerConnection`); silent ones are asked and then left
3. `close`: all calls are cancelled
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping
from functools import partial

from edge.acceptor import Acceptor
from edge.h2.rpc_method import RpcMethod
from edge.h2.send_threads import Connection, SendThreads
from edge.h2.server_connection import H2ServerConnection, Judge, welcome
from edge.h2.tls_socket import HANDSHAKE_S, TlsSocket
from edge.security.server_tls import ServerTls, begins_with_tls
from edge.silent_peers import set_silence_timeout
from edge.standstill import sleep_and_see

_BACKLOG = 512
_MAX_CONNECTIONS = 4096
_MAX_CONNECTIONS_OF_PEER = 1024
_CHECK_S = 2.5

logger = logging.getLogger(__name__)


class H2Server:
    """`methods` by path; `judge` says of each call whether its caller may go on; `tls` is for every
    connection, or for those that begin so. A connection carries `max_calls` at a time. A peer that
    is silent for `ping_after_s` is asked whether it lives, and left after `give_up_after_s`. Lives
    on the event loop on which it was made."""

    def __init__(
        self,
        methods: Mapping[str, RpcMethod],
        judge: Judge = welcome,
        tls: ServerTls | None = None,
        *,
        max_calls: int = 256,
        max_send_threads: int = 4,
        ping_after_s: float = 10.0,
        give_up_after_s: float = 25.0,
    ) -> None:
        self._methods = methods
        self._judge = judge
        self._tls = tls
        self._arriving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._max_calls = max_calls
        self._patience_s = (ping_after_s, give_up_after_s)
        self._threads = SendThreads(min(max_send_threads, os.cpu_count() or 1))
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self._connections: set[H2ServerConnection] = set()
        self._num_of_peer: Counter[str] = Counter()
        """Connections by address, those in a handshake included."""
        self._check: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int) -> int:
        """Listens on one address only. Returns the port. Raises OSError when it cannot be had."""
        infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = infos[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self.serve(listener)
        bound: int = listener.getsockname()[1]
        return bound

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections from a socket that listens already, which is ours from now on."""
        set_silence_timeout(listener, self._patience_s[1])
        self._listener = listener
        self._acceptor = Acceptor(listener, self._take)
        self._check = self._loop.create_task(self._check_forever())

    async def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        if self._listener is not None:
            self._listener.close()
        if self._check is not None:
            self._check.cancel()
        for task in self._arriving:
            task.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()
        self._threads.close()

    def _take(self, sock: socket.socket, peer: str) -> None:
        if not self._has_room_for(peer):
            sock.close()
            return
        self._num_of_peer[peer] += 1
        if self._tls is None:
            self._serve(sock, peer)
        else:
            task = self._loop.create_task(self._shake_hands(sock, peer, self._tls))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _has_room_for(self, peer: str) -> bool:
        num_all = len(self._connections) + len(self._arriving)
        return num_all < _MAX_CONNECTIONS and self._num_of_peer[peer] < _MAX_CONNECTIONS_OF_PEER

    async def _shake_hands(self, sock: socket.socket, peer: str, tls: ServerTls) -> None:
        try:
            self._serve(await self._secured(sock, tls), peer)
        except OSError as error:
            self._forget_peer(peer)
            logger.debug("a peer was refused: %s", error)
        except BaseException:
            self._forget_peer(peer)
            raise

    async def _secured(self, sock: socket.socket, tls: ServerTls) -> Connection:
        """Takes over `sock`. Raises OSError."""
        if tls.count_plaintext is None:
            return await TlsSocket.accept(sock, tls.context)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                is_tls = await begins_with_tls(sock)
        except BaseException:
            sock.close()
            raise
        if is_tls:
            return await TlsSocket.accept(sock, tls.context)
        tls.count_plaintext()
        return sock

    def _serve(self, sock: Connection, peer: str) -> None:
        self._connections.add(
            H2ServerConnection(
                sock,
                self._methods,
                self._judge,
                self._threads,
                partial(self._forget, peer),
                self._max_calls,
            )
        )

    def _forget(self, peer: str, connection: H2ServerConnection) -> None:
        self._connections.discard(connection)
        self._forget_peer(peer)

    def _forget_peer(self, peer: str) -> None:
        self._num_of_peer[peer] -= 1
        if not self._num_of_peer[peer]:
            del self._num_of_peer[peer]

    async def _check_forever(self) -> None:
        while True:
            late_s = await sleep_and_see(_CHECK_S)
            for connection in list(self._connections):
                connection.extend_silence_deadline(late_s)
                connection.check_alive(*self._patience_s)
