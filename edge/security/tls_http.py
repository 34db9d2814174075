"""Gives uvicorn HTTPS, with contexts that follow their files and handshakes that end in time."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import uvicorn


class TlsConfig(uvicorn.Config):
    """Serves HTTP; without `tls` it is plain. A handshake may take `handshake_timeout_s`."""

    def __init__(
        self,
        app: Any,
        tls: ssl.SSLContext | None,
        *,
        handshake_timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self._tls = tls
        self.handshake_timeout_s = handshake_timeout_s

    def load(self) -> None:
        super().load()
        self.ssl = self._tls


class TlsServer(uvicorn.Server):
    """Listens by itself, because uvicorn waits a minute for a handshake that never ends."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        if not isinstance(config, TlsConfig) or config.ssl is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self.started = False
        loop = asyncio.get_running_loop()
        for listener in sockets:
            server = await loop.create_server(
                self._protocol,
                sock=listener,
                ssl=config.ssl,
                ssl_handshake_timeout=config.handshake_timeout_s,
                backlog=config.backlog,
            )
            self.servers.append(server)
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        config = self.config
        protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
