"""Keeps responses, with OpenAI's client, through prefill and decode: two routers on one
database, one of which is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cli.local_cluster.cluster import free_ports
from tests.postgres_server import has_postgres, run_postgres

LONG: Any = {
    "format": {
        "type": "json_schema",
        "name": "long",
        "schema": {"type": "array", "items": {"enum": ["Ada"]}, "minItems": 300},
    }
}
"""Holds an answer back from its end for hundreds of tokens."""
TIMEOUT_S = 90.0


@contextlib.asynccontextmanager
async def second_router(cluster: Any, url: str) -> AsyncIterator[str]:
    """Gives the URL of another router of the cluster, on the same store."""
    argv = list(cluster.supervisor.services[0].spec.argv)
    (port,) = free_ports(1)
    argv[argv.index("--port") + 1] = str(port)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while b'"ready"' not in await process.stdout.readline():
                pass
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        while (found := await client.responses.retrieve(name)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
    return found


@pytest.mark.e2e
async def test_responses_are_kept_by_routers_that_may_die(
    start_cluster: Any, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = f"sqlite:///{tmp_path}/responses.db"
        if has_postgres():
            url = (await stack.enter_async_context(run_postgres())).url
        cluster = await start_cluster(
            router_args=["--response-store", url, "--response-lease-s", "2"]
        )
        other_url = await stack.enter_async_context(second_router(cluster, url))
        one, other = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=4)
            )
            for base in (cluster.url, other_url)
        ]
        await _turns(one, other)
        await _conversation(one, other)
        await _background(one, other)
        await _cancel(one, other)
        await cluster.wait_empty()
        await _kill(cluster, one, other)
        await cluster.wait_empty()


async def _turns(one: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
    """Answers are those to a client that sends everything itself, and hit the same cache."""
    asked: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
    words = ["Tell me a long story about Ada and her dog. " * 20, "And then?", "Why?", "The end?"]
    items: list[Any] = []
    previous = None
    for i, text in enumerate(words):
        client = (one, other)[i % 2]
        made = await client.responses.create(
            input=text, **asked, **({"previous_response_id": previous.id} if previous else {})
        )
        items.append({"role": "user", "content": text})
        alone = await one.responses.create(input=items, store=False, **asked)
        assert made.output_text == alone.output_text
        assert made.usage and alone.usage
        assert made.usage.input_tokens == alone.usage.input_tokens
        if previous is not None:
            cached = made.usage.input_tokens_details.cached_tokens
            assert cached > previous.usage.input_tokens // 2
        assert await other.responses.retrieve(made.id) == made
        items += [item.model_dump(exclude_none=True) for item in made.output]
        previous = made
    assert previous is not None
    listed = [item async for item in await other.responses.input_items.list(previous.id)]
    assert len(listed) == len(items) - len(previous.output)
    stream = await one.responses.create(
        input="Again.", stream=True, previous_response_id=previous.id, **asked
    )
    events = [event async for event in stream]
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert await other.responses.retrieve(events[-1].response.id) == events[-1].response
    await other.responses.delete(previous.id)
    with pytest.raises(openai.NotFoundError):
        await one.responses.retrieve(previous.id)


async def _conversation(one: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
    talk = await one.conversations.create(
        items=[{"type": "message", "role": "system", "content": "Be short."}],
        metadata={"topic": "Ada"},
    )
    for client in (one, other):
        made = await client.responses.create(
            model="demo", input="Hello.", conversation=talk.id, max_output_tokens=8
        )
        assert made.conversation and made.conversation.id == talk.id
    items = [item async for item in await one.conversations.items.list(talk.id, order="asc")]
    assert [item.role for item in items if item.type == "message"][:2] == ["system", "user"]
    assert len(items) >= 5
    found = await other.conversations.items.retrieve(items[0].id, conversation_id=talk.id)
    assert found == items[0]
    assert (await one.conversations.delete(talk.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await other.conversations.retrieve(talk.id)


async def _background(one: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "demo", "input": "Write.", "background": True, "max_output_tokens": 60}
    made = await one.responses.create(**asked)
    assert made.status == "queued"
    assert (await ended(other, made.id)).status in ("completed", "incomplete")
    told = []
    stream = await one.responses.create(stream=True, **asked)
    async for event in stream:
        told.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    name, last = told[0].response.id, told[-1].sequence_number
    rest = [
        event
        async for event in await other.responses.retrieve(name, stream=True, starting_after=last)
    ]
    numbers = [event.sequence_number for event in told + rest]
    assert numbers == list(range(len(numbers)))
    done = await ended(one, name)
    assert rest[-1].response == done
    text = "".join(
        event.delta for event in told + rest if event.type == "response.output_text.delta"
    )
    assert text == done.output_text


async def _begun(client: openai.AsyncOpenAI, **fields: Any) -> str:
    """Returns the id of a response of the background that a node works on."""
    made = await client.responses.create(
        model="demo", input="Write.", background=True, text=LONG, temperature=0, **fields
    )
    async with asyncio.timeout(TIMEOUT_S):
        while (found := await client.responses.retrieve(made.id)).status == "queued":
            await asyncio.sleep(0.05)
    assert found.status == "in_progress"
    return str(made.id)


async def _cancel(one: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
    """Leaves nodes empty, which the caller checks."""
    for client in (one, other):
        name = await _begun(one)
        assert (await client.responses.cancel(name)).status == "cancelled"
    await other.responses.delete(await _begun(one))


async def _kill(cluster: Any, one: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
    """Finds what was told as kept; the rest is another router's, or has failed."""
    stored = await one.responses.create(model="demo", input="Hi.", max_output_tokens=8)
    plain = await _begun(one)
    stream = await one.responses.create(
        model="demo", input="Write.", background=True, stream=True, text=LONG, temperature=0
    )
    async for event in stream:
        if event.sequence_number == 0:
            told = event.response.id
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    async with asyncio.timeout(TIMEOUT_S):
        while (await other.responses.retrieve(told)).status == "queued":
            await asyncio.sleep(0.05)
    os.kill(cluster.supervisor.services[0].pid, signal.SIGKILL)
    assert await other.responses.retrieve(stored.id) == stored
    failed = await ended(other, told)
    assert failed.status == "failed" and "gone" in failed.error.message
    done = await ended(other, plain)
    assert done.status in ("completed", "incomplete") and done.output_text.count("Ada") > 50
    await cluster.wait_whole()
    assert await one.responses.retrieve(plain) == done
    on = await one.responses.create(
        model="demo", input="On.", previous_response_id=stored.id, max_output_tokens=8
    )
    assert on.status in ("completed", "incomplete")
