"""Services of a node say who may call them, and what everybody may ask."""

from __future__ import annotations

from contextlib import asynccontextmanager

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.address import join_address
from edge.security.config import PlaintextRefused, Role, SecurityConfig
from edge.security.credentials import Credentials
from engine.node.grpc_server import NodeGrpcServer
from engine.node.http_server import ProbeServer
from engine.node.start_progress import StartProgress
from engine.node.status import NodeStatus
from prefill_node.metrics import PrefillMetrics
from prefill_node.service import CALLERS, PrefillServicer
from router.config import RouterSettings
from tandem_pb import node_pb2, node_pb2_grpc, prefill_pb2_grpc
from tandem_pb.prefill_pb2 import HandshakeRequest
from tests.prefill_node.prefill_fakes import FakePrefillEngine
from tests.router.cluster import eventually, run_router
from tests.security.authority import Authority
from tests.security.loopback import LOOPBACK_HOSTS

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@asynccontextmanager
async def prefill_node(credentials: Credentials, host: str = "127.0.0.1", port: int = 0):
    """Returns its address."""
    engine = FakePrefillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, 60)
    server = NodeGrpcServer(host, port, credentials, CALLERS)
    servicer = PrefillServicer(
        engine,
        status,
        PrefillMetrics(engine.config),
        max_waiting_requests=9,
        max_waiting_tokens=9,
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server.server)
    await server.start(status)
    try:
        yield join_address(host, server.port)
    finally:
        await server.stop()


async def outcomes(address: str, caller: Credentials) -> list[grpc.StatusCode]:
    """Returns how calls end: a load report, a handshake that fits no layout, and the health."""
    metadata = caller.metadata()
    await caller.meet(address)
    async with caller.channel(address, Role.PREFILL, []) as channel:
        watch = node_pb2_grpc.NodeStatusStub(channel).Watch(
            node_pb2.WatchRequest(), metadata=metadata
        )
        found = [OK if (await _first(watch)) is None else await watch.code()]
        watch.cancel()
        for call in (
            prefill_pb2_grpc.PrefillStub(channel).Handshake(HandshakeRequest(), metadata=metadata),
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()),
        ):
            found.append(await call.code())
    return found


async def _first(watch) -> grpc.aio.AioRpcError | None:
    try:
        assert isinstance(await watch.read(), node_pb2.NodeLoad)
    except grpc.aio.AioRpcError as error:
        return error
    return None


MISFIT = grpc.StatusCode.FAILED_PRECONDITION
"""The handshake was heard."""


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_routers_watch_and_decode_nodes_shake_hands(authority: Authority, host):
    async with prefill_node(authority.credentials(Role.PREFILL), host) as address:
        router, decode = authority.credentials(Role.ROUTER), authority.credentials(Role.DECODE)
        assert await outcomes(address, router) == [OK, DENIED, OK]
        assert await outcomes(address, decode) == [DENIED, MISFIT, OK]


async def test_the_health_of_a_node_is_no_secret(token_file):
    knows = Credentials(SecurityConfig(cluster_token_file=str(token_file("a" * 32))))
    async with prefill_node(knows) as address:
        assert await outcomes(address, knows) == [OK, MISFIT, OK]
        assert await outcomes(address, Credentials()) == [UNAUTHENTICATED, UNAUTHENTICATED, OK]


async def test_a_node_does_not_listen_for_everybody_in_plaintext():
    with pytest.raises(PlaintextRefused, match="--cluster-token-file"):
        NodeGrpcServer("0.0.0.0", 0, Credentials())


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_probes_and_scrapers_need_nothing(host):
    engine = FakePrefillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, 60)
    server = ProbeServer(host, 0)
    server.begin(StartProgress())

    async def probes() -> tuple[int, ...]:
        codes = []
        for path in ("health", "ready", "health/live"):
            async with client.get(f"http://{address}/{path}") as answer:
                codes.append(answer.status)
        return tuple(codes)

    address = join_address(host, server.port)
    try:
        async with aiohttp.ClientSession() as client:
            assert await probes() == (503, 503, 200)
            server.start(status, PrefillMetrics(engine.config).registry)
            assert await probes() == (200, 200, 200)
            async with client.get(f"http://{address}/metrics") as answer:
                assert "tandem_open_prefills" in await answer.text()
            status.work.draining = True
            assert await probes() == (200, 503, 200)
            engine.die()
            assert await probes() == (503, 503, 503)
    finally:
        await server.stop()


async def test_a_router_tells_once_that_it_is_refused(token_file, caplog):
    knows = Credentials(SecurityConfig(cluster_token_file=str(token_file("a" * 32))))
    async with prefill_node(knows) as address:
        settings = RouterSettings(port=0, prefill=address, watch_interval_s=0.05)
        async with run_router(settings) as router:
            failures = {"tier": "prefill"}
            await eventually(
                lambda: router.metric("tandem_router_watch_failures_total", **failures) >= 2
            )
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    told = [message for message in warnings if "cluster token" in message]
    assert len(told) == 1
