"""Nodes whose answers stop being HTTP half way are lost at once, though their reports come."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from router.errors import NodeLost
from router.nodes.transport import HttpTransport
from tests.router.cluster import TIMEOUT_S, Cluster, eventually
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
        assert not response.is_cut
        go_on.set()
        await eventually(lambda: response.is_cut)
        with pytest.raises(NodeLost):
            await response.read_chunk()
        response.close()
    finally:
        await transport.close()
