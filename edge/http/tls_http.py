"""Gives uvicorn HTTPS, with contexts that follow their files and handshakes that end in time."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import uvicorn

from edge.http.answers.stopped_answer import QuietEnd
from edge.http.connection.http_listener import EitherListener, HttpListener
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
    """Listens by itself: with uvicorn and uvloop a turn of the event loop accepts one connection,
    and a handshake that never ends has a minute."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sockets is None:
            await super().startup()
            return
        await super().startup([])
        self.started = False
        for listener in sockets:
            listener.listen(self.config.backlog)
            self.servers.append(cast("asyncio.Server", self._listen(listener)))
        self.started = True

    def _listen(self, listener: socket.socket) -> HttpListener:
        config = self.config
        tls = config.tls if isinstance(config, TlsConfig) else None
        timeout_s = config.handshake_timeout_s if isinstance(config, TlsConfig) else 0.0
        if tls is not None and tls.count_plaintext is not None:
            return EitherListener(listener, tls, self._protocol, timeout_s)
        context = None if tls is None else tls.context
        return HttpListener(listener, self._protocol, context, timeout_s)

    def _protocol(self) -> asyncio.Protocol:
        config = self.config
        protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
