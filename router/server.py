"""Runs the router: listens, says so, and ends without breaking an answer.

1. listening   the socket is bound, watches have begun; one JSON line on standard output
2. draining    SIGTERM or SIGINT: `/ready` says no, and for `drain_delay_s` requests are still
               taken, so that load balancers have time to notice
3. closing     no new connections; open answers may take `drain_timeout_s` to end
4. ended       exit code 0. A second signal cuts the open answers short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from edge.address import join_address
from edge.http.connection.guarded_protocol import ConnectionLimits, guarded_protocol
from edge.http.tls_http import TlsConfig, TlsServer
from edge.security.credentials import Credentials
from edge.security.server_tls import ServerTls
from edge.security.tls_files import TlsFiles
from edge.silent_peers import set_silence_timeout
from edge.supervisor import tell_supervisor
from router.app import create_admin_app, create_app
from router.config import RouterSettings
from router.errors import ConfigurationError
from router.make_responses import KeptRoutes
from router.make_services import OuterWorld, Services

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Longer than HTTP clients keep idle connections (5 to 15 s): if we closed first, a request that
was just being sent would be lost with the connection."""


_LAST_TURNS = 10
"""Turns of the event loop before the door is shut: connections that came while this process was
held up are accepted and their requests read in them, and would be reset."""

_BACKLOG = 4096
_SEND_BUFFER_BYTES = 256 << 10
"""Bytes of each connection that a client that reads slowly may leave lying with the kernel."""


class AdminServer(uvicorn.Server):
    """Serves `/metrics` and `/status`, when they have a port of their own."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(ConnectionLimits()),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the router's server."""
        yield


class RouterServer(TlsServer):
    """Serves the API; `/metrics` and `/status` are at `admin_listener`, if there is one."""

    def __init__(
        self,
        settings: RouterSettings,
        listener: socket.socket,
        world: OuterWorld | None = None,
        admin_listener: socket.socket | None = None,
    ) -> None:
        app = create_app(settings, world)
        limits = settings.connection_limits(settings.max_connections_per_address)
        super().__init__(
            TlsConfig(
                app,
                _https(settings, app.state.services.credentials),
                handshake_timeout_s=settings.header_timeout_s,
                loop="uvloop",
                http=guarded_protocol(limits, app.state.key_check, settings.http_front()),
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
            )
        )
        self.services: Services = app.state.services
        self._kept: KeptRoutes | None = getattr(app.state, "kept", None)
        self._drain_delay_s = settings.drain_delay_s
        self._drain_timeout_s = settings.drain_timeout_s
        self._listener = listener
        self._closing: asyncio.TimerHandle | None = None

        self._admin: uvicorn.Server | None = None
        self._admin_listener = admin_listener

    async def run_until_drained(self) -> None:
        """Serves until drained. The admin port stays open until the last answer has ended."""
        if self._admin_listener is None:
            await self.serve(sockets=[self._listener])
            return
        self._admin = AdminServer(create_admin_app(self.services))
        serving = asyncio.create_task(self._admin.serve(sockets=[self._admin_listener]))
        try:
            await self.serve(sockets=[self._listener])
        finally:
            self._admin.should_exit = True
            await serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        drain_s = self._drain_delay_s + self._drain_timeout_s
        facts = {"role": "router", "host": host, "port": port, "drain_s": drain_s}
        if self._admin_listener is not None:
            facts["admin_port"] = self._admin_listener.getsockname()[1]
        tell_supervisor("ready", **facts)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain. Python calls it in between two steps of the event loop."""
        if self.services.draining:
            self.force_exit = self.should_exit = True
            return
        self.services.draining = True
        logger.info("draining: closing in %g s", self._drain_delay_s)
        loop = asyncio.get_event_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain_delay_s, self._close)

    def _close(self) -> None:
        self.services.feed.close()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._kept is not None:
            self._kept.begin_drain()
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)
        await super().shutdown(sockets)


def https_files(settings: RouterSettings) -> tuple[str, str] | None:
    """Returns certificate and key for clients; None for plain HTTP. Raises `ConfigurationError`."""
    certificate, key = settings.https_cert_file, settings.https_key_file
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigurationError("--https-cert-file and --https-key-file are given both or not.")
    return str(certificate), str(key)


def _https(settings: RouterSettings, credentials: Credentials) -> ServerTls | None:
    """Returns the TLS for clients. Raises `ConfigurationError`, `SecurityError`."""
    files = https_files(settings)
    if files is None:
        return None
    context = TlsFiles(*files).server_context(ssl.CERT_NONE)
    return ServerTls(context, credentials.plaintext_counter("https"))


def bind(host: str, port: int, silence_timeout_s: float = 20.0) -> socket.socket:
    """Returns a listener, whose clients may be silent for `silence_timeout_s`, as
    `edge.silent_peers` says. `::` is every address of both families, whatever the host's default
    is. Raises `OSError` when the address cannot be had.

    It listens at once: before that another socket with SO_REUSEADDR, as that of the admin port or
    of a second router, can bind the same address, and the server would fail where it begins.

    The protocol is named because asyncio turns off Nagle's delay only for sockets that say TCP.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    set_silence_timeout(listener, silence_timeout_s)
    if host == "::":
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {join_address(host, port)} ({error.strerror}); "
            "choose another port or address"
        ) from None
    return listener
