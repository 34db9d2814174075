"""The memory behind a request is free when its connection or its answer ends, without a collection
of garbage: collections are rare (`router.garbage`), and streams that were left are many."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from socket import SO_LINGER, SOL_SOCKET

import pytest
from aiohttp import web

from tests.edge.left_behind import garbage_is_kept, left_behind
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.fakes import Handler, answer_json, break_after, never_answer, stream_forever
from tests.router.token_server import TokenHandler, Writer


async def connect(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = router.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def request(version: str = "1.1", path: str = "/v1/completions", **more: object) -> bytes:
    data = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 3, **more}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def hang_up(router: RunningRouter, writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()
    await eventually(lambda: router.num_open == 0)
    await eventually(lambda: not router.server.server_state.connections)


async def left_in_a_stream(router: RunningRouter) -> None:
    reader, writer = await connect(router)
    writer.write(request(prompt="for ever", max_tokens=10_000, stream=True))
    await reader.readuntil(b"data: ")
    await hang_up(router, writer)


async def left_in_a_stream_without_a_journal(router: RunningRouter) -> None:
    reader, writer = await connect(router)
    writer.write(request(prompt="for ever, without a journal", stream=True))
    await reader.readuntil(b"data: ")
    await hang_up(router, writer)


async def reset_in_a_stream(router: RunningRouter) -> None:
    reader, writer = await connect(router)
    writer.write(request(prompt="for ever", max_tokens=10_000, stream=True))
    await reader.readuntil(b"data: ")
    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    await hang_up(router, writer)


async def left_while_it_waits(router: RunningRouter) -> None:
    _, writer = await connect(router)
    writer.write(request(prompt="never"))
    await eventually(lambda: router.num_open > 0)
    await hang_up(router, writer)


async def left_before_its_stream_begins(router: RunningRouter) -> None:
    _, writer = await connect(router)
    writer.write(request(prompt="never", stream=True))
    await eventually(lambda: router.num_open > 0)
    await hang_up(router, writer)


async def left_in_its_body(router: RunningRouter) -> None:
    _, writer = await connect(router)
    writer.write(request()[:-3])
    await eventually(lambda: bool(router.server.server_state.connections))
    await hang_up(router, writer)


async def answered_again_and_again(router: RunningRouter) -> None:
    """On one connection, which is kept alive."""
    reader, writer = await connect(router)
    for _ in range(3):
        writer.write(request(stream=True))
        await reader.readuntil(b"\r\n0\r\n\r\n")
    await hang_up(router, writer)


async def answered_to_an_old_client(router: RunningRouter) -> None:
    reader, writer = await connect(router)
    writer.write(request("1.0", stream=True))
    await reader.read()
    await hang_up(router, writer)


async def refused(router: RunningRouter) -> None:
    reader, writer = await connect(router)
    writer.write(request(path="/v1/nothing") + b"no HTTP\r\n\r\n")
    await reader.read()
    await hang_up(router, writer)


async def refused_by_its_node(router: RunningRouter) -> None:
    reader, writer = await connect(router)
    writer.write(request(prompt="refuse"))
    await reader.readuntil(b"error")
    await hang_up(router, writer)


Way = Callable[[RunningRouter], Awaitable[None]]
_JOURNALED = TokenHandler()
_JOURNALED_FOR_EVER = TokenHandler(gap_s=0.01)


async def by_prompt(request: web.Request) -> web.StreamResponse:
    match (await request.json())["prompt"]:
        case "for ever":
            return await _JOURNALED_FOR_EVER(request)
        case "for ever, without a journal":
            return await stream_forever()(request)
        case "never":
            return await never_answer()(request)
        case "refuse":
            return await answer_json(400, {"error": {"message": "no"}})(request)
    return await _JOURNALED(request)


@pytest.mark.parametrize(
    ("way", "keepalive_s"),
    [
        (left_in_a_stream, 0.0),
        (left_in_a_stream, 10.0),
        (left_in_a_stream_without_a_journal, 10.0),
        (reset_in_a_stream, 10.0),
        (left_while_it_waits, 10.0),
        (left_before_its_stream_begins, 10.0),
        (left_in_its_body, 10.0),
        (answered_again_and_again, 10.0),
        (answered_to_an_old_client, 10.0),
        (refused, 10.0),
        (refused_by_its_node, 10.0),
    ],
)
async def test_nothing_waits_for_the_collector(
    cluster: Cluster, way: Way, keepalive_s: float
) -> None:
    router = await cluster.router(
        await cluster.decode(handler=by_prompt), sse_keepalive_s=keepalive_s
    )
    await way(router)
    with garbage_is_kept():
        await way(router)
        await way(router)
        assert not left_behind()


async def breaks_off(writer: Writer) -> None:
    if writer.num_tokens >= 2:
        writer.abort()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "bad",
    [TokenHandler(fault=breaks_off), break_after(), answer_json(503, {"error": {"message": "no"}})],
    ids=["midst", "beginning", "refuses"],
)
async def test_nor_does_an_answer_that_moves(
    cluster: Cluster, bad: Handler, is_stream: bool
) -> None:
    """An error that was raised from itself held all that its frames knew, of each lost answer."""
    nodes = [await cluster.decode(handler=bad), await cluster.decode(handler=TokenHandler())]
    router = await cluster.router(*nodes, ejection_failures=1000)

    async def ask() -> None:
        """Asks until the bad one has got one: which of equals a request goes to is chance."""
        before = len(nodes[0].requests)
        while len(nodes[0].requests) == before:
            for number in range(6):
                await router.text({"model": "demo", "prompt": f"{number}", "max_tokens": 5,
                                   "seed": 1, "stream": is_stream})  # fmt: skip
        await eventually(lambda: router.num_open == 0)

    await ask()
    with garbage_is_kept():
        await ask()
        assert not left_behind()
