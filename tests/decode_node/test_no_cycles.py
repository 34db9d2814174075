"""The memory behind a request of a decode node is free when its connection or its answer ends,
without a collection of garbage."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.decode_node.decode_fakes import FakeRequest, until
from tests.decode_node.http_node import HttpNode, http_node, live
from tests.edge.left_behind import garbage_is_kept, left_behind

_JOURNAL = {"x-tandem-journal": "1"}
_CHAT = "/v1/chat/completions"


class Client:
    """One connection, and requests on it."""

    def __init__(self, node: HttpNode, url: str) -> None:
        self.node = node
        self._address = url.removeprefix("http://").partition(":")

    async def connect(self) -> asyncio.StreamReader:
        host, _, port = self._address
        reader, self._writer = await asyncio.open_connection(host, int(port))
        return reader

    def ask(
        self, path: str = "/v1/completions", version: str = "1.1",
        headers: dict[str, str] | None = None, **body: object,
    ) -> None:  # fmt: skip
        turns = [{"role": "user", "content": "the dog"}]
        begin = {"messages": turns} if path == _CHAT else {"prompt": [5, 6, 7]}
        data = json.dumps({**begin, "max_tokens": 5, **body}).encode()
        told = {"Host": "x", "Content-Type": "application/json", **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        head = f"POST {path} HTTP/{version}\r\n{lines}Content-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)

    async def hang_up(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
        await until(lambda: self.node.state.open.count == 0, "no open request")

    async def left_after(self, num_tokens: int, **request: object) -> None:
        """Asks, and hangs up when the engine has brought this many tokens."""
        reader = await self.connect()
        engine = self.node.engine
        come: list[FakeRequest] = []
        engine.on_generate = come.append
        self.ask(max_tokens=50, **request)  # type: ignore[arg-type]
        await until(lambda: bool(come), "a request in the engine")
        if num_tokens:
            engine.produce(come[0], num_tokens)
            await reader.readuntil(b"data: ")
        await self.hang_up()
        engine.on_generate = engine.produce_all


async def left_in_a_stream(client: Client) -> None:
    await client.left_after(2, stream=True)


async def left_in_a_chat(client: Client) -> None:
    await client.left_after(2, path=_CHAT, stream=True)


async def left_in_a_journaled_stream(client: Client) -> None:
    await client.left_after(2, headers=_JOURNAL, stream=True)


async def left_before_the_first_token(client: Client) -> None:
    await client.left_after(0, stream=True)


async def left_without_a_stream(client: Client) -> None:
    await client.left_after(0)


async def answered_again_and_again(client: Client) -> None:
    """On one connection, which is kept alive."""
    reader = await client.connect()
    for path in ("/v1/completions", _CHAT):
        for headers in ({}, _JOURNAL):
            client.ask(path=path, headers=headers, stream=True)
            await reader.readuntil(b"\r\n0\r\n\r\n")
    client.ask()
    await reader.readuntil(b'"usage"')
    await client.hang_up()


async def answered_by_two_nodes(client: Client) -> None:
    """A prefill node brings the first token."""
    node, engine = client.node, client.node.engine
    here = engine.on_generate
    node.nodes.on_call = lambda call: (call.first_token(), call.taken())
    engine.on_generate = lambda fake: engine.kv_arrives(fake)
    reader = await client.connect()
    told = {**_JOURNAL, "x-prefiller-host-port": "a:1", "x-tandem-timeline": "1"}
    client.ask(headers=told, stream=True)
    await until(lambda: bool(engine.requests) and engine.only.has_first_token, "a token")
    engine.produce_all(engine.only)
    await reader.readuntil(b"\r\n0\r\n\r\n")
    await client.hang_up()
    node.nodes.calls.clear()
    engine.on_generate = here


async def answered_to_an_old_client(client: Client) -> None:
    reader = await client.connect()
    client.ask(version="1.0", stream=True)
    await reader.read()
    await client.hang_up()


async def refused(client: Client) -> None:
    reader = await client.connect()
    client.ask(temperature=-1, stream=True)
    await reader.readuntil(b"temperature")
    client.ask(path="/v1/nothing")
    await reader.readuntil(b"error")
    await client.hang_up()


async def failed_in_its_midst(client: Client) -> None:
    """The engine cannot go on with it: streamed and whole, with a token before and without."""
    reader = await client.connect()
    engine = client.node.engine

    def fail(fake: FakeRequest) -> None:
        engine.produce(fake, 1, finish_reason="error", error="this cannot be")

    engine.on_generate = fail
    for is_stream in (True, False):
        client.ask(stream=is_stream)
        await reader.readuntil(b"this cannot be")
    engine.on_generate = engine.produce_all
    await client.hang_up()


@pytest.mark.parametrize(
    "way",
    [left_in_a_stream, left_in_a_chat, left_in_a_journaled_stream, left_before_the_first_token,
     left_without_a_stream, answered_again_and_again, answered_by_two_nodes,
     answered_to_an_old_client, refused, failed_in_its_midst],
)  # fmt: skip
async def test_nothing_waits_for_the_collector(way: Callable[[Client], Awaitable[None]]) -> None:
    async with http_node(auto=False) as node, live(node) as url:
        node.engine.on_generate = node.engine.produce_all
        client = Client(node, url)
        await way(client)
        node.engine.forget_ended()
        with garbage_is_kept():
            for _ in range(2):
                await way(client)
                node.engine.forget_ended()
            assert not left_behind()


async def test_a_life_that_has_ended_leaves_nothing() -> None:
    """A node that changes its role makes all of this anew each time. What frameworks remember of
    routes must not hold what was made for the last life."""
    async with http_node() as node, live(node) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            for path in ("/health", "/v1/models", "/v1/models/tiny", "/metrics", "/nothing"):
                await client.get(path)
            body = {"prompt": [5, 6, 7], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        life = [weakref.ref(one) for one in (node.app, node.proxy, node.engine)]
    del node
    gc.collect()
    assert [one() for one in life] == [None] * len(life)
