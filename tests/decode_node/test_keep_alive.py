"""Streams of a node that is asked without a router are never silent for long either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import openai
import pytest

from decode_node.answer.answer import Answer, Write
from edge.http.answers.event_writer import EventWriter
from tests.decode_node.decode_fakes import until
from tests.decode_node.http_node import HttpNode, http_node, live

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
KEEP_ALIVE = ": keep-alive"
STREAM = {"prompt": [1], "max_tokens": 4, "stream": True, "seed": 1}
"""It ends by itself, and with this seed the first token has text: an answer begins with that."""


async def silence(node: HttpNode, seconds: float = 10.0) -> None:
    """Lets so much time pass for the answers that are open."""
    beats = node.state.heartbeats
    await until(lambda: bool(beats._pulses), "an answer is awaited")
    for pulse in beats._pulses:
        pulse.sent_at -= seconds
    await beats.beat()


async def test_a_stream_begins_with_a_comment_where_its_first_token_takes_long() -> None:
    async with http_node(auto=False) as node:
        running = asyncio.create_task(node.client.post(COMPLETIONS, json=STREAM))
        fake = await node.engine.added()
        await silence(node, 9.0)
        await silence(node, 1.0)
        node.engine.produce(fake, 1)
        await silence(node)
        node.engine.produce(fake, 3)
        response = await running
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events[0] == KEEP_ALIVE and events.count(KEEP_ALIVE) == 2
    assert events[-1] == "data: [DONE]"


async def test_an_answer_in_time_says_in_its_head_who_computed_it() -> None:
    async with http_node(prefill="a:1") as node:
        response = await node.client.post(COMPLETIONS, json=STREAM)
    assert response.headers["x-accel-buffering"] == "no"
    assert KEEP_ALIVE not in response.text


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", MESSAGES])
async def test_an_error_is_a_status_until_the_stream_begins_and_an_event_then(path: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {**STREAM, "messages": messages} if path != COMPLETIONS else STREAM
    if path != COMPLETIONS:
        body.pop("prompt")
    for has_begun in (False, True):
        async with http_node(auto=False) as node:
            running = asyncio.create_task(node.client.post(path, json=body))
            fake = await node.engine.added()
            if has_begun:
                await silence(node)
            node.engine.produce(fake, 1, finish_reason="error", error="this cannot be")
            response = await running
        if not has_begun:
            assert response.status_code == 400 and "this cannot be" in response.text
            continue
        assert response.status_code == 200
        [comment, told] = response.text.removesuffix("\n\n").split("\n\n")
        assert comment == KEEP_ALIVE
        assert told.startswith("event: error\ndata: {" if path == MESSAGES else "data: {")
        assert "this cannot be" in told


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_nobody_foresaw_is_told_too(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail = asyncio.Event()

    async def broken(answer: Answer, write: Write) -> None:
        await may_fail.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(Answer, "stream", broken)
    async with http_node() as node:
        running = asyncio.create_task(node.client.post(COMPLETIONS, json=STREAM))
        await silence(node, 10.0 if has_begun else 0.0)
        may_fail.set()
        response = await running
    assert response.status_code == (200 if has_begun else 500)
    assert response.text.startswith(KEEP_ALIVE) is has_begun
    assert "the server failed; see its log" in response.text


@pytest.mark.parametrize(
    ("settings", "headers"),
    [({"sse_keepalive_s": 0.0}, {}), ({}, {"x-tandem-sse-keepalive": "0"})],
    ids=["turned off", "the router makes them"],
)
async def test_where_nobody_wants_them_there_are_none(
    settings: dict[str, Any], headers: dict[str, str]
) -> None:
    async with http_node(auto=False, **settings) as node:
        asking = node.client.post(COMPLETIONS, json=STREAM, headers=headers)
        running = asyncio.create_task(asking)
        fake = await node.engine.added()
        await silence(node, 1000.0)
        node.engine.produce(fake, 4)
        assert KEEP_ALIVE not in (await running).text


async def test_a_router_s_journal_is_silent_before_the_answer() -> None:
    """Without a head the router knows that nothing has begun, and may try another node."""
    async with http_node(auto=False) as node:
        asking = node.client.post(COMPLETIONS, json=STREAM, headers={"x-tandem-journal": "1"})
        running = asyncio.create_task(asking)
        fake = await node.engine.added()
        await silence(node, 1000.0)
        (writer,) = node.state.heartbeats._pulses
        assert isinstance(writer, EventWriter) and not writer.has_begun
        node.engine.produce(fake, 1)
        await silence(node)
        node.engine.produce(fake, 3)
        events = (await running).text.split("\n\n")
    assert ":" in events and KEEP_ALIVE not in events


# The clients that people use -------------------------------------------------------------------


async def completion(client: openai.AsyncOpenAI, _: Any) -> AsyncIterator[str]:
    async for part in await client.completions.create(
        model="tiny", prompt="a", max_tokens=9, stream=True
    ):
        yield part.choices[0].text


async def chat(client: openai.AsyncOpenAI, _: Any) -> AsyncIterator[str]:
    async for part in await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=9, stream=True
    ):
        if part.choices and part.choices[0].delta.content:
            yield part.choices[0].delta.content


async def response(client: openai.AsyncOpenAI, _: Any) -> AsyncIterator[str]:
    async for part in await client.responses.create(
        model="tiny", input="a", max_output_tokens=9, stream=True
    ):
        if part.type == "response.output_text.delta":
            yield part.delta


async def message(_: Any, client: anthropic.AsyncAnthropic) -> AsyncIterator[str]:
    async with client.messages.stream(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=9
    ) as stream:
        async for text in stream.text_stream:
            yield text


Reader = Callable[[openai.AsyncOpenAI, anthropic.AsyncAnthropic], AsyncIterator[str]]


@pytest.mark.parametrize("read", [completion, chat, response, message])
async def test_clients_read_on_over_comments(read: Reader) -> None:
    async def collect(texts: AsyncIterator[str]) -> list[str]:
        return [text async for text in texts]

    async with http_node(auto=False, scripts=["abc"]) as node, live(node) as url:
        known: dict[str, Any] = {"api_key": "none", "max_retries": 0}
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", **known) as first,
            anthropic.AsyncAnthropic(base_url=url, **known) as second,
        ):
            reading = asyncio.create_task(collect(read(first, second)))
            fake = await node.engine.added()
            while not fake.finished:
                await silence(node)
                node.engine.produce(fake, 1)
            assert "".join(await reading) == "abc"
