"""Holds the HTTP servers of a node: how they listen, and the small one for probes and scrapers.

    GET  /health/live   200 while the node starts, or its engine works, else 503
    GET  /health     200 while the engine works, else 503
    GET  /ready      200 while new work is taken, else 503; while the node starts, with the stage
    GET  /metrics    Prometheus
    GET  /steps      the engine's last steps, and what held it up; ?since=SECONDS of its `now`

The small one is plain HTTP even where services speak TLS: kubelets and scrapers have no
certificate, and nothing of a request is logged here.

    1. `ProbeServer(host, port)`: the port is taken at once
    2. `begin`: answers that the node starts, and how far it is
    3. `start`: answers for the node
    4. `stop`
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edge.address import join_address
from edge.http.connection.guarded_protocol import ConnectionLimits, guarded_protocol
from edge.http.exposition import Exposition
from edge.http.outer_edge import OuterEdge
from edge.http.tls_http import TlsServer
from edge.silent_peers import set_silence_timeout
from engine.node.grpc_server import PortInUse
from engine.node.start_progress import StartProgress
from engine.node.status import NodeStatus

_BACKLOG = 2048
_SEND_BUFFER_BYTES = 256 << 10
"""Bytes of each connection that a client that reads slowly may leave lying with us."""


class HttpServer(TlsServer):
    """Serves HTTP without handling signals, which are the node's: it drains before it lets us
    stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, silence_timeout_s: float = 20.0) -> socket.socket:
    """Returns a socket that listens; its clients may be silent for `silence_timeout_s`, as
    `edge.silent_peers` says. Raises `PortInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise PortInUse(
            f"cannot listen on {join_address(host, port)} ({reason}); "
            f"choose another port or address"
        ) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    set_silence_timeout(listener, silence_timeout_s)
    return listener


class ProbeServer:
    """Answers on the node's event loop, so that one that hangs is noticed. Raises `PortInUse`."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._app = Starlette()
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    def begin(self, progress: StartProgress) -> None:
        """Serves. All but one path say that the node is not there yet."""
        self._app = Starlette(routes=_routes_at_start(progress))
        self._serve()

    def start(self, status: NodeStatus, metrics: CollectorRegistry) -> None:
        self._app = Starlette(routes=_routes(status, metrics))
        if self._serving is None:
            self._serve()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def _serve(self) -> None:
        self._server = HttpServer(
            uvicorn.Config(
                OuterEdge(self._answer, lambda: False),
                http=guarded_protocol(ConnectionLimits()),
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=1,
                ws="none",
                proxy_headers=False,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Stops the server. Idempotent."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()


def _routes(status: NodeStatus, metrics: CollectorRegistry) -> list[Route]:
    async def health(request: Request) -> Response:
        report = status.crash_report
        fault = status.fault() + (f" (crash report: {report})" if report else "")
        return _verdict(fault, status.own_fault())

    async def ready(request: Request) -> Response:
        stopping = "stopping" if status.work.draining else ""
        return _verdict(status.fault() or stopping or status.own_fault())

    exposition = Exposition(metrics)

    async def scrape(request: Request) -> Response:
        return await exposition.response(request)

    async def steps(request: Request) -> Response:
        try:
            since = float(request.query_params.get("since", "0"))
        except ValueError:
            return Response("since has to be a number of seconds", status_code=400)
        report = status.history.report(since)
        return Response(msgspec.json.encode(report), media_type="application/json")

    routes = {
        "/health/live": health,
        "/health": health,
        "/ready": ready,
        "/metrics": scrape,
        "/steps": steps,
    }
    return [Route(path, answer) for path, answer in routes.items()]


def _routes_at_start(progress: StartProgress) -> list[Route]:
    async def live(request: Request) -> Response:
        return _verdict("", str(progress))

    async def not_yet(request: Request) -> Response:
        return _verdict(str(progress))

    return [Route("/health/live", live), Route("/{path:path}", not_yet)]


def _verdict(fault: str, remark: str = "") -> Response:
    return Response(fault or remark, status_code=503 if fault else 200, media_type="text/plain")
