"""Runs the gRPC server that every node has: load reports, the standard health service, and on a
prefill node its own service besides.

    1. `NodeGrpcServer(host, port, ...)`: the port is taken at once, so that a port in use is
       reported before a model loads
    2. `start`: serves; health is SERVING exactly while `status` finds no fault and nothing drains
    3. `stop`
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from edge.address import join_address
from edge.security.call_guard import CallGuard
from edge.security.config import Role
from edge.security.credentials import Credentials
from engine.node.status import NodeStatus, NodeStatusServicer
from tandem_pb import node_pb2_grpc

STATUS_SERVICE = "tandem.v1.NodeStatus"

MAX_MESSAGE_BYTES = 32 << 20
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every two seconds to notice a dead node; so do we, to notice dead clients.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_HEALTH_INTERVAL_S = 0.5


class PortInUse(Exception):
    """The address cannot be listened on."""


class NodeGrpcServer:
    """Serves gRPC. `server` takes further services before `start`; `callers` are their names, and
    who may call them. Load reports are for routers, health for everybody. Raises `PortInUse`,
    `PlaintextRefused`."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        callers: Mapping[str, Collection[Role]] | None = None,
    ) -> None:
        callers = callers or {}
        guard = CallGuard(credentials, {STATUS_SERVICE: {Role.ROUTER}, **callers})
        self.server = grpc.aio.server(options=_OPTIONS, interceptors=[guard])
        self._services = ("", *callers)
        self._health = health_aio.HealthServicer()
        self._health_task: asyncio.Task[None] | None = None
        try:
            self.port = credentials.add_port(self.server, host, port)
        except RuntimeError:
            raise PortInUse(
                f"cannot listen on {join_address(host, port)}, probably another process does; "
                f"choose another port or address"
            ) from None

    async def start(self, status: NodeStatus) -> None:
        node_pb2_grpc.add_NodeStatusServicer_to_server(  # type: ignore[no-untyped-call]
            NodeStatusServicer(status), self.server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        await self._report_health(status)
        await self.server.start()
        self._health_task = asyncio.create_task(self._watch_health(status))

    async def stop(self, grace_s: float) -> None:
        """Stops; open calls have `grace_s` to end. Idempotent."""
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
            self._health_task = None
        await self.server.stop(grace_s)

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
