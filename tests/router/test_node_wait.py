"""Nodes that are all gone for a moment cost a request that moment, and nothing else."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import answer_json
from tests.router.test_connections import connect
from tests.router.token_server import TokenHandler, expected, texts

BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}


async def status_of(router: RunningRouter, **headers: str) -> int:
    async with asyncio.timeout(TIMEOUT_S), router.post(BODY, **headers) as response:
        await response.read()
        return response.status


async def test_requests_outlive_a_restart_of_all_nodes(cluster: Cluster) -> None:
    nodes = [await cluster.decode(f"d{i}", TokenHandler()) for i in range(2)]
    router = await cluster.router(*nodes, no_node_wait_s=TIMEOUT_S)
    for node in nodes:
        await node.stop()
    asking = [asyncio.create_task(router.text(BODY)) for _ in range(20)]
    await eventually(lambda: router.num_open == 20)
    await eventually(lambda: router.metric("tandem_router_retries_total", reason="unreachable") > 0)
    for node in nodes:
        await node.restart()
    assert [texts(answer) for answer in await asyncio.gather(*asking)] == [[expected(BODY)]] * 20


async def test_requests_wait_for_the_first_node(cluster: Cluster) -> None:
    node = await cluster.decode("d", TokenHandler())
    entry = node.entry
    await node.stop()
    router = await cluster.router(decode=entry, no_node_wait_s=TIMEOUT_S)
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: router.num_open == 1)
    await node.restart()
    assert texts(await asking) == [expected(BODY)]


@pytest.mark.parametrize("other", ["gone", "stops too"])
async def test_nodes_that_stop_are_waited_for_as_those_that_are_gone(
    cluster: Cluster, other: str
) -> None:
    """They answer for a moment, before their reports say so."""
    stops = answer_json(503, {"error": {"message": "this node is stopping"}})
    nodes = [await cluster.decode(f"d{i}", stops) for i in range(2)]
    router = await cluster.router(*nodes, no_node_wait_s=TIMEOUT_S)
    if other == "gone":
        await nodes[1].stop()
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: bool(nodes[0].requests))
    nodes[0].handler = TokenHandler()
    assert texts(await asking) == [expected(BODY)]


async def test_a_node_that_is_full_is_not_waited_for(cluster: Cluster) -> None:
    full = answer_json(429, {"error": {"message": "full"}})
    router = await cluster.router(await cluster.decode("d", full), no_node_wait_s=2 * TIMEOUT_S)
    assert await status_of(router) == 429


async def test_a_node_that_does_not_come_back_is_a_503(cluster: Cluster) -> None:
    node = await cluster.decode("d")
    router = await cluster.router(node, no_node_wait_s=0.3)
    await node.stop()
    assert await status_of(router) == 503


async def test_nobody_waits_beyond_a_deadline(cluster: Cluster) -> None:
    router = await cluster.router(no_node_wait_s=2 * TIMEOUT_S)
    assert await status_of(router, **{"x-slo-ttft-ms": "200"}) == 503


async def test_a_client_that_leaves_waits_no_longer(cluster: Cluster) -> None:
    router = await cluster.router(no_node_wait_s=2 * TIMEOUT_S)
    _, writer = await connect(router)
    body = json.dumps(BODY).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    writer.write(head + body)
    await eventually(lambda: router.services.gates.of("demo").num_started == 1)
    writer.close()
    await eventually(lambda: router.num_open == 0)
    assert router.services.gates.of("demo").num_started == 0


async def test_those_who_wait_for_a_node_count_as_begun(cluster: Cluster) -> None:
    node = await cluster.decode("d")
    entry = node.entry
    await node.stop()
    router = await cluster.router(
        decode=entry, no_node_wait_s=2 * TIMEOUT_S, max_prefills_per_node=2
    )
    asking = [asyncio.create_task(status_of(router)) for _ in range(3)]
    gate = router.services.gates.of("demo")
    await eventually(lambda: (gate.num_started, len(gate.line)) == (2, 1))
    await node.restart()
    assert await asyncio.gather(*asking) == [200] * 3
