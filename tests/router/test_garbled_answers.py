"""Nodes whose answers stop being HTTP half way are lost at once, though their reports come; and
what is no message of gRPC is a failure of its node alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest
from aiohttp import web

from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from router.errors import NodeLost, NodesRefused
from router.nodes.adapters.adapter_asker import AdapterAsker
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.http.transport import HttpTransport
from router.nodes.load_monitor import LoadMonitor
from router.nodes.node import Node
from router.nodes.operations.prefix_caches import PrefixCaches
from router.nodes.operations.role_changes import RoleChanges
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from tests.garbled_server import garbled_server, only_warning
from tests.router.cluster import TIMEOUT_S, Cluster, eventually
from tests.router.factories import report
from tests.router.fakes import Handler, event, open_stream

BODY = {"model": "demo", "prompt": "hello", "max_tokens": 3, "stream": True}


def garble(go_on: asyncio.Event | None = None) -> Handler:
    """Sends one event, then what is no chunk, and keeps the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(0))
        if go_on is not None:
            await go_on.wait()
        assert request.transport is not None
        request.transport.write(b"zz\r\nno chunk\r\n")
        await asyncio.Event().wait()
        return response

    return handler


async def test_the_client_of_a_garbled_answer_is_told(cluster: Cluster) -> None:
    go_on = asyncio.Event()
    node = await cluster.decode(handler=garble(go_on))
    router = await cluster.router(node, stream_stall_s=TIMEOUT_S * 10)
    async with router.post(BODY) as response:
        assert await response.content.readuntil(b"\n\n") == event(0)
        go_on.set()
        assert b"node_lost" in await response.content.read()
    assert router.metric("tandem_router_node_failures_total", reason="lost") == 1


async def test_who_reads_a_garbled_answer_later_hears_of_it(cluster: Cluster) -> None:
    go_on = asyncio.Event()
    node = await cluster.decode(handler=garble(go_on))
    transport = HttpTransport(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S, Credentials(SecurityConfig()))
    await transport.open()
    try:
        url = f"http://{node.target}/v1/completions"
        response = await transport.request("POST", url, {}, b"{}")
        assert await response.read_chunk() == event(0)
        go_on.set()
        with pytest.raises(NodeLost):
            await response.read_chunk()
        response.close()
    finally:
        await transport.close()


@asynccontextmanager
async def garbled_node() -> AsyncIterator[NodeAddress]:
    """Answers every call for its status with bytes that are no message."""
    async with garbled_server() as target:
        yield NodeAddress(NodeRole.PREFILL, target, target)


@pytest.mark.parametrize("wish", [LoadAdapterRequest(), UnloadAdapterRequest()])
async def test_a_garbled_answer_about_an_adapter_is_a_failure(
    wish: LoadAdapterRequest | UnloadAdapterRequest, caplog: pytest.LogCaptureFixture
) -> None:
    async with garbled_node() as address:
        asker = AdapterAsker(Credentials(SecurityConfig()))
        answer = await asker.ask(Node(address), wish)
    assert answer.failed and "no message" in answer.said
    assert not caplog.records, "gRPC would log a traceback"


async def test_a_garbled_answer_about_a_cache_is_of_that_node_alone(cluster: Cluster) -> None:
    good = await cluster.prefill()
    registry = NodeRegistry()
    async with garbled_node() as address:
        target = good.target
        registry.set_members([address, NodeAddress(NodeRole.PREFILL, target, target)])
        caches = PrefixCaches(
            registry=registry, credentials=Credentials(SecurityConfig()), forget=lambda: None
        )
        said = await caches.reset()
    assert "no message" in said[f"prefill {address}"]
    assert (said[f"prefill {target}"], good.status.num_resets) == ("reset", 1)


async def test_garbled_reports_are_told_once_and_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[NodeRole] = []
    events = Mock(watch_failed=failures.append)
    credentials = Credentials(SecurityConfig())
    monitor = LoadMonitor(NodeRegistry(), events, 0.05, credentials, lambda *_: None)
    async with garbled_node() as address:
        monitor.set_members([address])
        await eventually(lambda: len(failures) > 1)
        await monitor.close()
    assert "no message" in only_warning(caplog)
    assert not events.report_came.called


async def test_a_garbled_answer_about_a_role_is_no_change() -> None:
    registry = NodeRegistry()
    async with garbled_node() as address:
        registry.set_members([address])
        registry.apply_report(address, report(NodeRole.PREFILL))
        changes = RoleChanges(registry=registry, credentials=Credentials(SecurityConfig()))
        with pytest.raises(NodesRefused, match="no message"):
            await changes.change(address.target, NodeRole.DECODE, 1.0)
    [node] = registry.all_nodes()
    assert registry.usable(NodeRole.PREFILL) == [node], "it is not taken for one that drains"
