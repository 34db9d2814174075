"""The official client, unchanged, against the router and against a decode node."""

from __future__ import annotations

from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about Ada."}]


@pytest.mark.e2e
async def test_everything_a_program_does(start_cluster: Any) -> None:
    cluster = await start_cluster()
    for url in (cluster.url, cluster.decodes[0].url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            await _models(client)
            await _chat(client)
            await _completions(client)
            await _errors(client)
    await cluster.wait_empty()


async def _models(client: openai.AsyncOpenAI) -> None:
    models = [m.id async for m in client.models.list()]
    assert models == ["demo"]


async def _chat(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=60, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    choice = whole.choices[0]
    assert choice.message.content and choice.logprobs and choice.logprobs.content
    assert whole.usage and len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(len(t.top_logprobs) == 3 for t in choice.logprobs.content)
    text, usage = "", None
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=60, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(c.delta.content or "" for c in chunk.choices)
    assert text == choice.message.content
    assert usage and usage.total_tokens == whole.usage.total_tokens


async def _completions(client: openai.AsyncOpenAI) -> None:
    several = await client.completions.create(
        model="demo",
        prompt="One morning, Ada walked to the",
        n=3,
        temperature=0.9,
        seed=5,
        max_tokens=12,
    )
    assert [c.index for c in several.choices] == [0, 1, 2]
    again = await client.completions.create(
        model="demo",
        prompt="One morning, Ada walked to the",
        n=3,
        temperature=0.9,
        seed=5,
        max_tokens=12,
    )
    assert [c.text for c in again.choices] == [c.text for c in several.choices]
    first = several.choices[0].text
    word = first.split()[1]
    stopped = await client.completions.create(
        model="demo",
        prompt="One morning, Ada walked to the",
        temperature=0.9,
        seed=5,
        max_tokens=12,
        stop=word,
    )
    assert word not in stopped.choices[0].text
    limits: dict[str, Any] = {"bad_words": [word], "return_token_ids": True}
    for extra in (limits, {**limits, "allowed_token_ids": list(range(20, 220))}):
        limited = await client.completions.create(
            model="demo",
            prompt="One morning, Ada walked to the",
            n=2,
            temperature=0.9,
            seed=5,
            max_tokens=12,
            extra_body=extra,
        )
        for choice in limited.choices:
            assert word not in choice.text.split()
            allowed = extra.get("allowed_token_ids")
            assert allowed is None or set(choice.token_ids) <= set(allowed)  # type: ignore[attr-defined]
    assert stopped.choices[0].finish_reason == "stop"


async def _errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.completions.create(model="demo", prompt="x", temperature=-1)
