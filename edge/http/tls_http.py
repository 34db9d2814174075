"""Gives uvicorn HTTPS, with contexts that follow their files and handshakes that end in time."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import uvicorn

from edge.http.answers.stopped_answer import QuietEnd
from edge.http.connection.either_listener import EitherListener
from edge.security.server_tls import ServerTls


class TlsConfig(uvicorn.Config):
    """Serves HTTP; without `tls` it is plain. A handshake may take `handshake_timeout_s`."""

    def __init__(
        self,
        app: Any,
        tls: ServerTls | None,
        *,
        handshake_timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self.tls = tls
        self.handshake_timeout_s = handshake_timeout_s

    def load(self) -> None:
        super().load()
        self.loaded_app = QuietEnd(self.loaded_app)
        self.ssl = None if self.tls is None else self.tls.context


class TlsServer(uvicorn.Server):
    """Listens by itself, because uvicorn waits a minute for a handshake that never ends."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        if not isinstance(config, TlsConfig) or config.tls is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self.started = False
        for listener in sockets:
            self.servers.append(await self._listen(listener, config, config.tls))
        self.started = True

    async def _listen(
        self, listener: socket.socket, config: TlsConfig, tls: ServerTls
    ) -> asyncio.Server:
        timeout_s = config.handshake_timeout_s
        if tls.count_plaintext is not None:
            listener.listen(config.backlog)
            either = EitherListener(listener, tls, self._protocol, timeout_s)
            return cast("asyncio.Server", either)
        return await asyncio.get_running_loop().create_server(
            self._protocol,
            sock=listener,
            ssl=tls.context,
            ssl_handshake_timeout=timeout_s,
            backlog=config.backlog,
        )

    def _protocol(self) -> asyncio.Protocol:
        config = self.config
        protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
