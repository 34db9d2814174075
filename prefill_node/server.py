"""Runs a prefill node.

1. the ports are taken, the checkpoint read, the engine started (progress on standard output)
2. ready: one JSON line with the address; gRPC health says SERVING
3. SIGTERM: draining. New prompts are refused, running ones finish, KV waits until it was
   taken or its lease ends; then exit code 0
-  the engine is frozen: open calls fail, so that decode nodes go elsewhere; new ones are refused
-  the engine dies: health says NOT_SERVING, open calls fail, exit code 1
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from edge.address import join_address
from edge.http.event_loop.lasting_task import start_lasting
from edge.logs.request_log import RequestLog
from edge.security.config import Role
from edge.security.credentials import Credentials
from edge.security.metrics import CredentialsCollector
from edge.tracing.metrics import TracerCollector
from edge.tracing.tracer import Tracer
from engine.frontend.async_llm import AsyncLLM
from engine.node.grpc_server import NodeGrpcServer
from engine.node.http_server import ProbeServer
from engine.node.lifetime import NodeLifetime
from engine.node.metrics.engine_metrics import EngineCollector
from engine.node.prefix_client import PrefixClient
from engine.node.prefix_servicer import CALLERS as PREFIX_CALLERS
from engine.node.prefix_servicer import PrefixServicer
from engine.node.process import StopSignal, emit_ready, start_engine
from engine.node.services.role_switch import RoleSwitch
from engine.node.start_progress import StartProgress
from engine.node.status import NodeStatus
from prefill_node.config import PrefillNodeSettings
from prefill_node.metrics import PrefillMetrics
from prefill_node.service import CALLERS, PrefillServicer
from tandem_pb import node_pb2, prefill_pb2_grpc, prefixes_pb2_grpc

logger = logging.getLogger(__name__)

_WATCH_S = 0.25
_MAX_MESSAGE = 160 << 20
"""Bytes of a call: patches of images are most of it."""


class PrefillNode:
    """Holds everything of a running node. `run` → `close`; engine and traces belong to the caller.
    `switch`: takes the request for another role; None: it has one."""

    def __init__(
        self,
        settings: PrefillNodeSettings,
        engine: AsyncLLM,
        ports: PrefillPorts,
        credentials: Credentials,
        tracer: Tracer,
        switch: RoleSwitch | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ports = ports
        self._status = NodeStatus(
            engine,
            node_pb2.NODE_ROLE_PREFILL,
            settings.stuck_after_s,
            settings.frozen_after_s,
            switch,
        )
        self._status.own_fault = credentials.watched_fault(Role.PREFILL)
        self._metrics = metrics = PrefillMetrics(engine.config)
        metrics.registry.register(EngineCollector(engine))
        metrics.registry.register(CredentialsCollector(credentials))
        metrics.registry.register(TracerCollector(tracer))
        self._servicer = PrefillServicer(
            engine,
            self._status,
            metrics,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            tracer=tracer,
            requests=RequestLog(is_on=settings.log_requests),
        )
        self._status.reset_prefix_cache = self._reset_prefix_cache
        self._client = PrefixClient(self._servicer.peer, credentials)

    async def run(self, stop: StopSignal) -> int:
        """Serves until asked to stop, or to become another node, or until the engine dies; returns
        the exit code."""
        await self._start_services()
        self._emit_ready()
        lifetime = NodeLifetime(
            self._engine,
            self._status,
            self._servicer.open,
            self._servicer.abort_all,
            self._settings.drain_timeout_s,
        )
        watching = start_lasting(
            _fail_frozen_calls(self._status, self._servicer), "the watch over prefill calls"
        )
        try:
            with self._metrics.lateness.watch():
                return await lifetime.run(stop)
        finally:
            watching.cancel()

    async def close(self) -> None:
        await self._client.close()
        self._engine.prefixes.ask = None
        await self._ports.close()

    async def _reset_prefix_cache(self, within_s: float) -> bool:
        open_requests = self._servicer.open
        return await open_requests.reset_when_idle(self._engine.reset_prefix_cache, within_s)

    async def _start_services(self) -> None:
        server = self._ports.grpc.server
        prefill_pb2_grpc.add_PrefillServicer_to_server(  # type: ignore[no-untyped-call]
            self._servicer, server
        )
        if self._settings.shares_prefixes:
            self._status.serves_prefixes = True
            prefixes_pb2_grpc.add_PrefixesServicer_to_server(  # type: ignore[no-untyped-call]
                PrefixServicer(self._engine, self._status), server
            )
            self._engine.prefixes.ask = self._client.ask
        await self._ports.grpc.start(self._status)
        if self._ports.probes is not None:
            self._ports.probes.start(self._status, self._metrics.registry)

    def _emit_ready(self) -> None:
        address = join_address(self._settings.host, self._ports.grpc.port)
        facts: dict[str, object] = {"role": "prefill", "address": address}
        if self._ports.probes is not None:
            facts["metrics_port"] = self._ports.probes.port
        emit_ready(self._engine, self._settings.drain_timeout_s, **facts)


@dataclass(frozen=True, slots=True)
class PrefillPorts:
    """The ports that a node listens on. Call `take` before anything that needs time."""

    grpc: NodeGrpcServer
    probes: ProbeServer | None

    @classmethod
    def take(cls, settings: PrefillNodeSettings, credentials: Credentials) -> PrefillPorts:
        """Takes the ports. Raises `PortInUse`, `PlaintextRefused`."""
        callers = CALLERS | (PREFIX_CALLERS if settings.shares_prefixes else {})
        host, port = settings.host, settings.metrics_port
        return cls(
            NodeGrpcServer(host, settings.port, credentials, callers, _MAX_MESSAGE),
            None if port is None else ProbeServer(host, port),
        )

    def begin(self, progress: StartProgress) -> None:
        """Answers probes while the node starts."""
        if self.probes is not None:
            self.probes.begin(progress)

    async def close(self) -> None:
        """Idempotent."""
        if self.probes is not None:
            await self.probes.stop()
        await self.grpc.stop()


async def serve(settings: PrefillNodeSettings) -> int:
    """Runs the node and returns its exit code. Raises `CheckpointError`, `EngineDeadError`,
    `PortInUse`, `SecurityError`, `TracingError`."""
    stop, progress = StopSignal(), StartProgress()
    credentials = Credentials(settings.security_config())
    ports = PrefillPorts.take(settings, credentials)
    ports.begin(progress)
    try:
        config = await asyncio.to_thread(settings.to_engine_config, "kv_producer")
        tracer = Tracer.open(settings, "tandem-prefill", config.engine_id)
        engine = await start_engine(config, None, stop, progress)
        if engine is None:
            return 0
        node = PrefillNode(settings, engine, ports, credentials, tracer)
        try:
            return await node.run(stop)
        finally:
            await node.close()
            await engine.shutdown()
            await asyncio.to_thread(tracer.close)
    finally:
        await ports.close()


async def _fail_frozen_calls(status: NodeStatus, servicer: PrefillServicer) -> None:
    """Fails open calls when the engine is frozen, until cancelled."""
    while True:
        if status.is_frozen and servicer.open.count:
            logger.error("%d calls fail: %s", servicer.open.count, status.fault())
            servicer.abort_all()
        await status.wait_change(_WATCH_S)
