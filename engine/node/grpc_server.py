"""Runs the gRPC server that every node has: load reports, the standard health service, and on a
prefill node its own service besides.

    1. `NodeGrpcServer(host, port, ...)`: the port is taken at once, so that a port in use is
       reported before a model loads
    2. `start`: serves; health is SERVING exactly while `status` finds no fault and nothing drains
    3. `stop`
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Mapping

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from edge.address import join_address
from edge.http.event_loop.lasting_task import start_lasting
from edge.security.config import Role
from edge.security.credentials import Credentials
from engine.node.services.services_server import ServicesServer
from engine.node.status import NodeStatus, NodeStatusServicer
from tandem_pb import node_pb2_grpc

STATUS_SERVICE = "tandem.v1.NodeStatus"

MAX_MESSAGE_BYTES = 32 << 20
_BACKLOG = 512
_HEALTH_INTERVAL_S = 0.5


class PortInUse(Exception):
    """The address cannot be listened on."""


class NodeGrpcServer:
    """Serves gRPC. `server` takes further services before `start`; `callers` are their names, and
    who may call them. Load reports are for routers, health for all. Raises `PortInUse`,
    `PlaintextRefused`."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        callers: Mapping[str, Collection[Role]] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        callers = callers or {}
        credentials.check_listen(host)
        self.server = ServicesServer(
            credentials, {STATUS_SERVICE: {Role.ROUTER}, **callers}, max_message_bytes
        )
        self._services = ("", *callers)
        self._health = health_aio.HealthServicer()
        self._health_task: asyncio.Task[None] | None = None
        try:
            self._listener = _listen(host, port)
        except OSError:
            raise PortInUse(
                f"cannot listen on {join_address(host, port)}, probably another process does; "
                f"choose another port or address"
            ) from None
        self.port: int = self._listener.getsockname()[1]

    async def start(self, status: NodeStatus) -> None:
        node_pb2_grpc.add_NodeStatusServicer_to_server(  # type: ignore[no-untyped-call]
            NodeStatusServicer(status), self.server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        await self._report_health(status)
        await self.server.start(self._listener)
        self._health_task = start_lasting(self._watch_health(status), "the watch over the engine")

    async def stop(self) -> None:
        """Stops; open calls are cancelled. Idempotent."""
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
            self._health_task = None
        await self.server.stop()
        self._listener.close()

    async def _watch_health(self, status: NodeStatus) -> None:
        while True:
            await status.wait_change(_HEALTH_INTERVAL_S)
            status.give_up_if_stuck()
            await self._report_health(status)

    async def _report_health(self, status: NodeStatus) -> None:
        states = health_pb2.HealthCheckResponse
        is_serving = not status.work.draining and not status.fault()
        state = states.SERVING if is_serving else states.NOT_SERVING
        for service in self._services:
            await self._health.set(service, state)


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises OSError."""
    is_v6 = ":" in host
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
