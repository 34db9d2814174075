"""Streams: a client that leaves, one that reads slowly, and very many at once."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import (
    FakeDecodeNode,
    answer_json,
    event,
    never_answer,
    open_stream,
    stream_forever,
    stream_tokens,
)

BODY = {"model": "demo", "prompt": "hello", "stream": True}


async def test_a_client_that_leaves_mid_stream_frees_the_node(cluster: Cluster) -> None:
    decode = await cluster.decode(handler=stream_forever())
    router = await cluster.router(await cluster.prefill(), decode)
    async with router.post(BODY) as response:
        await response.content.readany()
        assert decode.num_open == 1
        response.close()
    await eventually(lambda: decode.num_open == 0)
    assert decode.num_aborted == 1
    await eventually(lambda: _requests(router, "499") == 1)


@pytest.mark.parametrize("node", ["waiting for the head", "waiting for the first byte"])
async def test_a_client_that_leaves_before_the_answer_frees_the_node(
    cluster: Cluster, node: str
) -> None:
    async def only_head(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await asyncio.Event().wait()
        return response

    decode = await cluster.decode(handler=only_head if "byte" in node else never_answer())
    router = await cluster.router(await cluster.prefill(), decode)
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: decode.num_open == 1)
    [prefill] = [n for n in router.services.registry.all_nodes() if n.address.role == "prefill"]
    assert prefill.work.num_tokens > 0
    asking.cancel()
    await eventually(lambda: decode.num_open == 0)
    await eventually(lambda: _requests(router, "499") == 1)
    assert router.metric("tandem_router_retries_total", reason="lost") == 0


async def test_a_client_that_leaves_does_not_disturb_others(cluster: Cluster) -> None:
    decode = await cluster.decode(handler=stream_tokens(50, gap_s=0.005))
    router = await cluster.router(decode)
    staying = [asyncio.create_task(router.text(BODY)) for _ in range(10)]
    leaving = [asyncio.create_task(router.text(BODY)) for _ in range(10)]
    await eventually(lambda: decode.num_open == 20)
    for task in leaving:
        task.cancel()
    texts = await asyncio.gather(*staying)
    assert {text.count("data: ") for text in texts} == {51}
    await asyncio.gather(*leaving, return_exceptions=True)


async def test_a_client_that_does_not_read_stops_the_node_from_sending(cluster: Cluster) -> None:
    piece, sent = b"data: " + b"x" * 65536 + b"\n\n", 0

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = await open_stream(request)
        for _ in range(1000):
            await response.write(piece)
            sent += len(piece)
        return response

    pouring, quick = await cluster.decode("pouring", pour), await cluster.decode("quick")
    router = await cluster.router(pouring, quick)
    async with _asked_without_reading(router, pouring, quick) as client:
        before = 0
        while sent == 0 or sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 40 << 20
        assert quick.num_open == 0
        client.setblocking(False)
        received = await _drain(client)
    assert received > 1000 * len(piece)
    assert sent == 1000 * len(piece)


class _asked_without_reading:
    """A raw client with a small receive buffer whose request `node` is answering, and not `other`,
    which the router may choose as well."""

    def __init__(self, router: RunningRouter, node: FakeDecodeNode, other: FakeDecodeNode) -> None:
        self._router = router
        self._node, self._other = node, other

    async def __aenter__(self) -> socket.socket:
        host, port = self._router.url.removeprefix("http://").split(":")
        for _ in range(64):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
            body = b'{"model": "demo", "prompt": "x"}'
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            )
            before = len(self._other.requests)
            await asyncio.get_running_loop().sock_sendall(
                client, head.encode() + b"connection: close\r\n\r\n" + body
            )
            await eventually(
                lambda before=before: self._node.requests or len(self._other.requests) > before
            )
            if self._node.requests:
                self._client = client
                return client
            client.close()
        raise AssertionError("the policy never chose the node")

    async def __aexit__(self, *_exc: object) -> None:
        self._client.close()


async def _drain(client: socket.socket) -> int:
    size = 0
    async with asyncio.timeout(TIMEOUT_S):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            size += len(data)
    return size


async def test_events_arrive_one_by_one_and_not_in_the_end(cluster: Cluster) -> None:
    received = asyncio.Queue[bytes]()

    async def step_by_step(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for index in range(5):
            await response.write(event(index))
            assert await received.get() == event(index)
        return response

    router = await cluster.router(await cluster.decode(handler=step_by_step))
    async with router.post(BODY) as response:
        while chunk := await response.content.readany():
            received.put_nowait(chunk)
    assert received.empty()


async def test_500_streams_at_once_all_get_their_own_text(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def echo(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["user"]
        response = await open_stream(request)
        for index in range(10):
            await response.write(event(index, f"{name}-{index}"))
            await gate.wait()
        return response

    nodes = [await cluster.decode(f"d{i}", echo) for i in range(2)]
    router = await cluster.router(await cluster.prefill(), *nodes)

    async def ask(index: int) -> None:
        text = await router.text({**BODY, "user": f"u{index}"})
        assert text == b"".join(event(i, f"u{index}-{i}") for i in range(10)).decode()

    tasks = [asyncio.create_task(ask(index)) for index in range(500)]
    await eventually(lambda: sum(node.num_open for node in nodes) == 500)
    assert min(node.num_open for node in nodes) > 200
    gate.set()
    await asyncio.gather(*tasks)


async def test_an_answer_without_end_mark_or_length_still_passes(cluster: Cluster) -> None:
    async def old_style(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")
        request.transport.close()
        return web.Response()

    router = await cluster.router(await cluster.decode(handler=old_style))
    assert await router.text(BODY) == "hello"


async def test_connections_to_nodes_are_used_again(cluster: Cluster) -> None:
    peers = set()

    async def note_peer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return await answer_json(200, {})(request)

    router = await cluster.router(await cluster.decode(handler=note_peer))
    for _ in range(10):
        await router.text(BODY)
    assert len(peers) == 1


async def test_one_client_connection_serves_many_requests(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode())
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as client:
        for _ in range(5):
            async with client.post(router.url + "/v1/completions", json=BODY) as response:
                assert (await response.text()).endswith("[DONE]\n\n")
    assert _requests(router, "200") == 5


def _requests(router: RunningRouter, status: str) -> float:
    return router.metric("tandem_router_requests_total", path="/v1/completions", status=status)


# Nodes that hang: the process stands still, its connections stay open ----------------------------

IMPATIENT = {
    "stale_after_s": 0.3,
    "down_after_s": 1.5,
    "stream_stall_s": 1.01,
    "no_node_wait_s": TIMEOUT_S,
}
"""Requests wait for a node, as all nodes are in this process: where it gets no processor for longer
than they may be silent, all of them are down until they are heard again."""


@pytest.mark.parametrize("waits_for", ["the head", "the first byte"])
async def test_a_node_that_falls_silent_before_the_answer_is_left_for_another(
    cluster: Cluster, waits_for: str
) -> None:
    async def only_head(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await asyncio.Event().wait()
        return response

    hung = await cluster.decode("a", only_head if "byte" in waits_for else never_answer())
    other = await cluster.decode("b", stream_tokens(3))
    router = await cluster.router(await cluster.prefill(), hung, other, **IMPATIENT)
    await other.status.change(draining=True)
    await router.wait_usable(decode=1, prefill=1)
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: hung.num_open == 1)
    await other.status.change(draining=False)
    await router.wait_usable(decode=2, prefill=1)
    hung.status.silent = True
    assert (await asking).endswith("[DONE]\n\n")
    assert router.metric("tandem_router_retries_total", reason="lost") == 1
    await eventually(lambda: hung.num_open == 0)


async def test_a_node_that_falls_silent_in_the_answer_ends_it_with_an_error(
    cluster: Cluster,
) -> None:
    async def two_events(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(0) + event(1))
        await asyncio.Event().wait()
        return response

    hung = await cluster.decode(handler=two_events)
    router = await cluster.router(await cluster.prefill(), hung, **IMPATIENT)
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: hung.num_open == 1)
    hung.status.silent = True
    text = await asking
    assert text.startswith((event(0) + event(1)).decode())
    assert "node_lost" in text and "[DONE]" not in text


async def test_an_answer_that_flows_needs_no_reports(cluster: Cluster) -> None:
    decode = await cluster.decode(handler=stream_tokens(40, gap_s=0.05))
    router = await cluster.router(await cluster.prefill(), decode, **IMPATIENT)
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: decode.num_open == 1)
    decode.status.silent = True
    assert (await asking).endswith("[DONE]\n\n")
