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

from edge.address import join_address
from edge.logs.request_log import RequestLog
from edge.security.credentials import Credentials
from edge.security.metrics import CredentialsCollector
from edge.tracing.metrics import TracerCollector
from edge.tracing.tracer import Tracer
from engine.frontend.async_llm import AsyncLLM
from engine.node.grpc_server import NodeGrpcServer
from engine.node.http_server import ProbeServer
from engine.node.lifetime import NodeLifetime
from engine.node.metrics import EngineCollector
from engine.node.prefix_client import PrefixClient
from engine.node.prefix_servicer import CALLERS as PREFIX_CALLERS
from engine.node.prefix_servicer import PrefixServicer
from engine.node.process import StopSignal, emit_ready, start_engine
from engine.node.status import NodeStatus
from prefill_node.config import PrefillNodeSettings
from prefill_node.metrics import PrefillMetrics
from prefill_node.service import CALLERS, PrefillServicer
from tandem_pb import node_pb2, prefill_pb2_grpc, prefixes_pb2_grpc

logger = logging.getLogger(__name__)

_WATCH_S = 0.25
_MAX_MESSAGE = 160 << 20
"""Bytes of a call: patches of images are most of it."""


async def serve(settings: PrefillNodeSettings) -> int:
    """Runs the node and returns its exit code. Raises `CheckpointError`, `EngineDeadError`,
    `PortInUse`, `SecurityError`, `TracingError`."""
    stop = StopSignal()
    credentials = Credentials(settings.security_config())
    callers = CALLERS | (PREFIX_CALLERS if settings.shares_prefixes else {})
    server = NodeGrpcServer(settings.host, settings.port, credentials, callers, _MAX_MESSAGE)
    probes = None
    if settings.metrics_port is not None:
        probes = ProbeServer(settings.host, settings.metrics_port)
    config = settings.to_engine_config("kv_producer")
    tracer = Tracer.open(settings, "tandem-prefill", config.engine_id)
    engine = await start_engine(config, None, stop)
    if engine is None:
        return 0
    try:
        return await _serve_engine(settings, credentials, server, probes, engine, stop, tracer)
    finally:
        if probes is not None:
            await probes.stop()
        await server.stop()
        await engine.shutdown()
        await asyncio.to_thread(tracer.close)


async def _serve_engine(
    settings: PrefillNodeSettings,
    credentials: Credentials,
    server: NodeGrpcServer,
    probes: ProbeServer | None,
    engine: AsyncLLM,
    stop: StopSignal,
    tracer: Tracer,
) -> int:
    status = NodeStatus(
        engine, node_pb2.NODE_ROLE_PREFILL, settings.stuck_after_s, settings.frozen_after_s
    )
    metrics = PrefillMetrics(engine.config)
    metrics.registry.register(EngineCollector(engine))
    metrics.registry.register(CredentialsCollector(credentials))
    metrics.registry.register(TracerCollector(tracer))
    servicer = PrefillServicer(
        engine,
        status,
        metrics,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        tracer=tracer,
        requests=RequestLog(is_on=settings.log_requests),
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(  # type: ignore[no-untyped-call]
        servicer, server.server
    )
    client = PrefixClient(servicer.peer, credentials)
    if settings.shares_prefixes:
        status.serves_prefixes = True
        prefixes_pb2_grpc.add_PrefixesServicer_to_server(  # type: ignore[no-untyped-call]
            PrefixServicer(engine, status), server.server
        )
        engine.prefixes.ask = client.ask
    await server.start(status)
    facts: dict[str, object] = {
        "role": "prefill",
        "address": join_address(settings.host, server.port),
    }
    if probes is not None:
        probes.start(status, metrics.registry)
        facts["metrics_port"] = probes.port
    emit_ready(engine, **facts)
    lifetime = NodeLifetime(
        engine, status, servicer.open, servicer.abort_all, settings.drain_timeout_s
    )
    watching = asyncio.create_task(_let_go_of_frozen(status, servicer))
    try:
        return await lifetime.run(stop)
    finally:
        watching.cancel()
        await client.close()


async def _let_go_of_frozen(status: NodeStatus, servicer: PrefillServicer) -> None:
    """Fails open calls when the engine is frozen, until cancelled."""
    while True:
        if status.is_frozen and servicer.open.count:
            logger.error("%d calls fail: %s", servicer.open.count, status.fault())
            servicer.abort_all()
        await status.wait_change(_WATCH_S)
