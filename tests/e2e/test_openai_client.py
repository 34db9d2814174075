"""Official clients, unchanged, against the router and against a decode node."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import openai
import pydantic
import pytest

README = Path(__file__).parents[2] / "README.md"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about Ada."}]
ASKED: Any = {
    "type": "object",
    "properties": {"who": {"enum": ["Ada", "Bo"]}, "pages": {"type": "integer", "maximum": 9}},
    "required": ["who", "pages"],
    "additionalProperties": False,
}
"""The arguments of a tool that a model of any size can be held to."""


@pytest.mark.e2e
async def test_everything_a_program_does(start_cluster: Any) -> None:
    cluster = await start_cluster()
    await asyncio.to_thread(_readme, cluster.url)
    for url in (cluster.url, cluster.decodes[0].url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            await _models(client)
            await _chat(client)
            await _completions(client)
            await _long_answer(client)
            await _structured(client)
            await _errors(client)
            await _tool_calls(client)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as other:
            await _tool_use(other)
    await cluster.wait_empty()


def _readme(url: str) -> None:
    """Runs the program that README shows; it says in a comment what is printed."""
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program.replace("http://127.0.0.1:8000", url), {})
    assert program.endswith(f"# {printed.getvalue()}")


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


async def _long_answer(client: openai.AsyncOpenAI) -> None:
    """One may ask for more than the context has left, and gets that."""
    asked: Any = {"model": "demo", "prompt": [20] * 2030, "extra_body": {"ignore_eos": True}}
    cut = await client.completions.create(**asked, max_tokens=32_000, temperature=0)
    assert cut.usage and cut.usage.total_tokens == 2048 and cut.choices[0].finish_reason == "length"
    left = await client.completions.create(**asked, temperature=0)
    assert left.choices[0].text == cut.choices[0].text


class Dog(pydantic.BaseModel):
    name: Literal["Ada", "Bo"]
    born: datetime.date
    friends: Annotated[list[Literal["fox", "cat"]], pydantic.Field(max_length=3)]
    is_quick: bool


async def _structured(client: openai.AsyncOpenAI) -> None:
    """The client's own way from a class to a schema, and back from the answer."""
    settings: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 1.0}
    answers = await client.chat.completions.parse(
        **settings, response_format=Dog, n=2, seed=3, max_completion_tokens=800
    )
    for choice in answers.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Dog)
    choices = await client.chat.completions.create(
        **settings, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choices.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="the keyword not is not supported"):
        await client.chat.completions.create(**settings, extra_body={"guided_json": {"not": {}}})
    with pytest.raises(openai.APIError, match="allowed_token_ids"):
        nothing = {"guided_choice": ["yes", "no"], "allowed_token_ids": [7]}
        await client.chat.completions.create(**settings, extra_body=nothing)


async def _errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.completions.create(model="demo", prompt="x", temperature=-1)


def _check(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"who", "pages"}
    assert arguments["who"] in ("Ada", "Bo") and arguments["pages"] <= 9


async def _tool_calls(client: openai.AsyncOpenAI) -> None:
    """A model that knows no tools calls one all the same: prefill and decode node follow the
    grammar. Streams and whole answers of both APIs hold the same call. Left to itself it answers in
    text."""
    tool: Any = {"name": "find_story", "parameters": ASKED}
    chat: Any = {
        "model": "demo", "messages": MESSAGES, "seed": 3, "tool_choice": "required",
        "tools": [{"type": "function", "function": tool}], "parallel_tool_calls": False,
        "max_tokens": 200,
    }  # fmt: skip
    answer = await client.chat.completions.create(**chat)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "find_story"
    _check(json.loads(call.function.arguments))
    assert answer.choices[0].finish_reason == "tool_calls"
    async with client.chat.completions.stream(**chat) as stream:
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is lost."}
    history = {"messages": [*MESSAGES, answer.choices[0].message, result], "tool_choice": "auto"}
    said = await client.chat.completions.create(**{**chat, **history, "temperature": 0})
    assert said.choices[0].finish_reason in ("stop", "length") and said.choices[0].message.content
    asked: Any = {
        "model": "demo", "input": MESSAGES, "tools": [{"type": "function", **tool}],
        "tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": 3},
        "max_output_tokens": 200,
    }  # fmt: skip
    response = await client.responses.create(**asked)
    (item,) = response.output
    assert item.type == "function_call" and item.arguments == call.function.arguments
    async with client.responses.stream(**asked) as events:
        (other,) = (await events.get_final_response()).output
    assert other.type == "function_call" and other.arguments == item.arguments


async def _tool_use(client: anthropic.AsyncAnthropic) -> None:
    asked: Any = {
        "model": "demo", "messages": MESSAGES, "max_tokens": 200,
        "tools": [{"name": "find_story", "input_schema": ASKED}], "tool_choice": {"type": "any"},
        "extra_body": {"seed": 3},
    }  # fmt: skip
    message = await client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert message.usage == streamed.usage and message.usage.input_tokens > 0
    for block, other in zip(message.content, streamed.content, strict=True):
        assert block.type == "tool_use" and other.type == "tool_use"
        assert block.input == other.input
        _check(block.input)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(**{**asked, "extra_body": {"temperature": -1}})
