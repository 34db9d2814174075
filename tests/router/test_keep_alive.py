"""A stream is never silent for long, and nothing that depends on a status or a head is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from edge.http.answers.heartbeats import KEEP_ALIVE
from edge.http.errors import HttpError
from router.errors import NoNodeAvailable
from router.relay.client import Client, Clients
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import request
from tests.router.fakes import answer_json, event, open_stream, stream_tokens
from tests.router.test_migration import die_at, stop_afterwards
from tests.router.token_server import TokenHandler, expected, texts

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
BODY = {"model": "demo", "prompt": "hello", "stream": True}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
OFTEN_S = 0.02


class Wire:
    """Is where the answer goes. `beat` comes after as long a silence as one wants."""

    def __init__(self, path: str = COMPLETIONS) -> None:
        self.messages: list[Message] = []
        self.clients = Clients(keepalive_s=10.0)
        self.info = request(path=path, request_id="r1", is_stream=True, model="demo")

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def beat(self, client: Client, silent_s: float = 10.0) -> None:
        assert client.pulse is not None
        client.pulse.sent_at -= silent_s
        await self.clients.heartbeats.beat()

    @property
    def status(self) -> int:
        assert [m["type"] for m in self.messages].count("http.response.start") == 1
        assert self.messages[0]["type"] == "http.response.start"
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        assert not self.messages[-1].get("more_body", False)
        return b"".join(m["body"] for m in self.messages[1:])


# By hand ---------------------------------------------------------------------------------------


async def test_life_by_hand() -> None:
    wire = Wire()
    with wire.clients.client(wire.info, wire.send) as client:
        await wire.beat(client, 9.0)
        assert not wire.messages, "nothing was sent: it may still be an error"
        await wire.beat(client, 1.0)
        assert wire.status == 200
        assert wire.headers[b"content-type"].startswith(b"text/event-stream")
        assert wire.headers[b"x-accel-buffering"] == b"no"
        assert wire.headers[b"x-request-id"] == b"r1"
        assert wire.headers[b"x-tandem-model-version"] == b"demo"
        await wire.beat(client, 5.0)
        await wire.beat(client, 5.0)
        await client.start(200, EVENTS)
        await client.write(event(0), more=True)
        await wire.beat(client, 9.9)
        await wire.beat(client, 0.1)
        await client.write(event(1), more=False)
    assert wire.body == 2 * KEEP_ALIVE + event(0) + KEEP_ALIVE + event(1)
    assert not wire.clients.heartbeats._pulses


async def test_an_answer_in_time_has_the_head_that_it_would_have() -> None:
    wire = Wire()
    with wire.clients.client(wire.info, wire.send) as client:
        await client.start(200, [*EVENTS, (b"x-tandem-prefill-node", b"a:1")])
        await wire.beat(client)
        await client.write(event(0), more=False)
    assert wire.headers[b"x-tandem-prefill-node"] == b"a:1"
    assert wire.headers[b"x-accel-buffering"] == b"no"
    assert wire.body == KEEP_ALIVE + event(0)


async def test_who_wants_no_stream_gets_nothing_before_the_answer() -> None:
    wire = Wire()
    plain = request(path=COMPLETIONS, request_id="r1")
    with wire.clients.client(plain, wire.send) as client:
        assert client.pulse is None and not wire.clients.heartbeats._pulses
        await client.start(200, JSON)
        await client.write(b"{}", more=False)
    assert (wire.status, wire.body) == (200, b"{}")
    assert b"x-accel-buffering" not in wire.headers


async def test_nothing_is_put_into_an_event_that_comes_in_pieces() -> None:
    wire = Wire()
    with wire.clients.client(wire.info, wire.send) as client:
        await client.start(200, EVENTS)
        await client.write(b"data: a long", more=True)
        await wire.beat(client)
        await client.write(b" event\n\n", more=True)
        await wire.beat(client)
        await client.write(b"data: [DONE]\r\n\r\n", more=True)
        await wire.beat(client)
        await client.write(b"", more=False)
    assert wire.body == b"data: a long event\n\n%bdata: [DONE]\r\n\r\n%b" % (KEEP_ALIVE, KEEP_ALIVE)


async def test_nothing_is_put_into_what_the_client_is_taking() -> None:
    wire = Wire()
    may_take = asyncio.Event()

    async def slow(message: Message) -> None:
        if message.get("body") == event(0):
            await may_take.wait()
        await wire.send(message)

    with wire.clients.client(wire.info, slow) as client:
        await client.start(200, EVENTS)
        writing = asyncio.create_task(client.write(event(0), more=False))
        await asyncio.sleep(0)
        await wire.beat(client)
        may_take.set()
        await writing
    assert wire.body == event(0)


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("of", ["the router", "a node"])
async def test_an_error_is_a_status_until_the_stream_begins_and_an_event_then(
    path: str, of: str
) -> None:
    async def fail(client: Client, error: HttpError) -> None:
        if of == "the router":
            await client.fail(error)
            return
        await client.start(int(error.status), JSON)
        await client.write(error.body()[:9], more=True)
        await client.write(error.body()[9:], more=False)

    error = NoNodeAvailable("nobody is there")
    early, late = Wire(path), Wire(path)
    with early.clients.client(early.info, early.send) as client:
        await fail(client, error)
    assert (early.status, early.body) == (503, error.body())
    with late.clients.client(late.info, late.send) as client:
        await late.beat(client)
        await fail(client, error)
    assert late.status == 200
    told = late.body.removeprefix(KEEP_ALIVE).decode()
    assert told.endswith("\n\n") and told.count("\n\n") == 1
    if path == MESSAGES:
        assert told.startswith("event: error\n")
        assert json.loads(told.partition("data: ")[2])["error"]["type"] == "overloaded_error"
    else:
        assert json.loads(told.removeprefix("data: ")) == json.loads(error.body())


async def test_an_error_of_several_lines_is_one_event() -> None:
    wire = Wire()
    with wire.clients.client(wire.info, wire.send) as client:
        await wire.beat(client)
        await client.start(400, JSON)
        await client.write(json.dumps({"error": {"message": "no"}}, indent=1).encode(), more=False)
    told = wire.body.removeprefix(KEEP_ALIVE)
    assert told.count(b"\n") == 2 and json.loads(told.removeprefix(b"data: "))


@settings(deadline=None, max_examples=60)
@given(
    beats=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    status=st.sampled_from([200, 200, 400, 503]),
    num_events=st.integers(0, 4),
    cut=st.booleans(),
)
def test_whenever_keep_alives_come(
    beats: list[int], status: int, num_events: int, cut: bool
) -> None:
    """One head, then whole events in their order, and one end; comments between events alone."""

    async def run() -> None:
        wire = Wire()
        pieces = [event(i) for i in range(num_events)] if status == 200 else [b'{"error": 1}']
        if cut and status == 200:
            pieces = [part for one in pieces for part in (one[:7], one[7:])][:5]
        turns = iter(beats)
        with wire.clients.client(wire.info, wire.send) as client:
            for _ in range(next(turns)):
                await wire.beat(client)
            had_begun = bool(wire.messages)
            await client.start(status, EVENTS if status == 200 else JSON)
            for piece in pieces[:4]:
                await client.write(piece, more=True)
                for _ in range(next(turns)):
                    await wire.beat(client)
            await client.write(b"".join(pieces[4:]), more=False)
        assert wire.status == (200 if had_begun else status)
        sent = b"".join(pieces)
        if status != 200 and had_begun:
            sent = b"data: " + sent + b"\n\n"
        assert wire.body.replace(KEEP_ALIVE, b"") == sent

    asyncio.run(run())


# Through a router ------------------------------------------------------------------------------


async def first_line(response: aiohttp.ClientResponse) -> bytes:
    return await response.content.readuntil(b"\n\n")


def waiting_for(may_answer: asyncio.Event, num_tokens: int = 3) -> Any:
    async def handler(asked: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return await stream_tokens(num_tokens)(asked)

    return handler


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", RESPONSES, MESSAGES])
async def test_a_long_prompt_keeps_its_client_by_comments(cluster: Cluster, path: str) -> None:
    may_answer = asyncio.Event()
    node = await cluster.decode(handler=waiting_for(may_answer))
    router = await cluster.router(node, await cluster.prefill(), sse_keepalive_s=OFTEN_S)
    async with router.post(BODY, path=path) as response:
        assert response.status == 200
        assert response.headers["x-accel-buffering"] == "no"
        assert [await first_line(response) for _ in range(2)] == [KEEP_ALIVE] * 2
        [prefill] = [n for n in router.services.registry.all_nodes() if n.work.num_tokens]
        assert router.metric("tandem_router_prefilling_requests", model="demo") == 1
        may_answer.set()
        rest = await response.read()
    assert rest.replace(KEEP_ALIVE, b"") == b"".join(map(event, range(3))) + b"data: [DONE]\n\n"
    assert prefill.work.num_tokens == 0


async def test_another_node_is_tried_behind_a_stream_that_has_begun(cluster: Cluster) -> None:
    may_die = asyncio.Event()

    async def die(asked: web.Request) -> web.StreamResponse:
        await may_die.wait()
        assert asked.transport is not None
        asked.transport.abort()
        return web.Response()

    dying, other = await cluster.decode("a", die), await cluster.decode("b")
    router = await cluster.router(dying, other, sse_keepalive_s=OFTEN_S)
    await other.status.change(draining=True)
    await router.wait_usable(decode=1, prefill=0)
    async with router.post(BODY) as response:
        assert await first_line(response) == KEEP_ALIVE
        await other.status.change(draining=False)
        await router.wait_usable(decode=2, prefill=0)
        may_die.set()
        rest = await response.read()
    assert rest.replace(KEEP_ALIVE, b"").endswith(event(2) + b"data: [DONE]\n\n")
    assert router.metric("tandem_router_retries_total", reason="lost") == 1


async def test_what_is_refused_at_once_is_a_status(cluster: Cluster) -> None:
    wrong = {"error": {"message": "too long", "type": "invalid_request_error"}}
    node = await cluster.decode(handler=answer_json(400, wrong))
    router = await cluster.router(node, sse_keepalive_s=10.0)
    async with router.post(BODY) as response:
        assert (response.status, await response.json()) == (400, wrong)
    await node.status.change(draining=True)
    await router.wait_usable(decode=0, prefill=0)
    async with router.post(BODY) as response:
        assert response.status == 503 and "retry-after" in response.headers


async def test_a_late_refusal_is_an_event_and_counts_by_its_status(cluster: Cluster) -> None:
    may_refuse = asyncio.Event()
    wrong = {"error": {"message": "too long", "type": "invalid_request_error"}}

    async def refuse(asked: web.Request) -> web.StreamResponse:
        await may_refuse.wait()
        return web.json_response(wrong, status=400)

    node = await cluster.decode(handler=refuse)
    router = await cluster.router(node, sse_keepalive_s=OFTEN_S)
    client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    async with client:
        stream = await client.completions.create(model="demo", prompt="hello", stream=True)
        may_refuse.set()
        with pytest.raises(openai.APIError, match="too long"):
            await anext(aiter(stream))
    await eventually(lambda: requests_with(router, "400") == 1)


def requests_with(router: RunningRouter, status: str) -> float:
    return router.metric("tandem_router_requests_total", path=COMPLETIONS, status=status)


async def test_a_pause_is_filled_and_the_openai_client_reads_on(cluster: Cluster) -> None:
    may_go_on = asyncio.Event()

    async def pausing(asked: web.Request) -> web.StreamResponse:
        response = await open_stream(asked)
        await response.write(event(0))
        await may_go_on.wait()
        await response.write(event(1) + b"data: [DONE]\n\n")
        return response

    node = await cluster.decode(handler=pausing)
    router = await cluster.router(node, sse_keepalive_s=OFTEN_S)
    async with router.post(BODY) as response:
        while (line := await first_line(response)) == KEEP_ALIVE:
            pass  # The answer's beginning may be late.
        assert [line, await first_line(response)] == [event(0), KEEP_ALIVE]
    client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    async with client:
        stream = aiter(await client.completions.create(model="demo", prompt="x", stream=True))
        texts = [(await anext(stream)).choices[0].text]
        may_go_on.set()
        texts += [chunk.choices[0].text async for chunk in stream]
    assert texts == ["t0 ", "t1 "]


async def test_a_move_to_another_node_is_filled_and_nothing_is_lost(cluster: Cluster) -> None:
    """The only node dies in the answer and refuses more, until the client has had two comments."""
    node = await cluster.decode()
    node.handler = stop_afterwards(node, TokenHandler(fault=die_at(5)))
    router = await cluster.router(node, sse_keepalive_s=OFTEN_S)
    body = {**BODY, "seed": 7, "max_tokens": 12}
    async with router.post(body) as response:
        seen = [await first_line(response)]
        while seen.count(KEEP_ALIVE) < 2 or len(seen) < 7:
            seen.append(await first_line(response))
        node.handler = TokenHandler()
        seen.append(await response.read())
    assert texts(b"".join(seen).replace(KEEP_ALIVE, b"").decode()) == [expected(body)]
    assert router.metric("tandem_router_migrations_total", reason="lost") == 1


async def test_without_keep_alives_the_head_waits_for_the_answer(cluster: Cluster) -> None:
    may_answer = asyncio.Event()
    node = await cluster.decode(handler=waiting_for(may_answer))
    router = await cluster.router(node, sse_keepalive_s=0.0)
    asking = asyncio.create_task(router.text(BODY))
    await eventually(lambda: node.num_open == 1)
    assert not router.services.forwarder.clients.heartbeats._pulses
    may_answer.set()
    assert KEEP_ALIVE.decode() not in await asking


async def test_a_node_that_keeps_no_journal_leaves_keep_alives_to_the_router(
    cluster: Cluster,
) -> None:
    """A comment of the node would be the beginning of an answer to the router."""
    node = await cluster.decode()
    router = await cluster.router(node, max_migrations=0)
    await router.text(BODY)
    [(headers, _)] = node.requests
    assert headers["x-tandem-sse-keepalive"] == "0" and "x-tandem-journal" not in headers
