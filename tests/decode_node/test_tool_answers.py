"""Answers hold the calls of a model, whole and streamed, by the rules of the API."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from decode_node.answer.call_ids import CallIds
from decode_node.answer.chat_format import ChatFormat
from decode_node.parsers.families.families import CALL_FAMILIES
from decode_node.parsers.families.reasoning_families import REASONING_FAMILIES
from tests.decode_node.chat_clients import (
    CHAT,
    MESSAGES,
    SCRIPT,
    TOOLS,
    WEATHER,
    Accumulated,
    accumulated,
    as_accumulated,
    thinking_tokenizer,
)
from tests.decode_node.http_node import chunks_of, http_node, live


async def both(
    script: str, fields: dict[str, Any], **settings: Any
) -> tuple[Accumulated, Accumulated, dict[str, Any], dict[str, Any]]:
    """Returns an answer streamed and whole, the whole one's message, and its usage. Ids of calls
    differ, because they are two answers."""
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": 0, **fields}
    async with one_node(script, **settings) as node:
        whole = (await node.client.post(CHAT, json=body)).json()
        options = {"include_usage": True}
        streamed = {**body, "stream": True, "stream_options": options}
        chunks = chunks_of((await node.client.post(CHAT, json=streamed)).text)
    assert chunks[-1]["usage"] == whole["usage"]
    (stream,), (choice,) = accumulated(chunks), whole["choices"]
    found = as_accumulated(choice)
    for a, b in zip(stream.calls, found.calls, strict=True):
        assert a.pop("id") != b.pop("id")
    return stream, found, choice["message"], whole["usage"]


def one_node(script: str = SCRIPT, **settings: Any) -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=[script], context=1200, **settings)


async def test_reasoning_content_and_calls_are_apart() -> None:
    stream, whole, message, usage = await both(SCRIPT, {})
    assert stream == whole
    assert message["reasoning_content"] == "\nask\n"
    assert message["content"] == "\n\nI look."
    assert [(call["name"], json.loads(call["json"])) for call in whole.calls] == [
        ("get_weather", {"city": "Köln", "days": 2}), ("get_time", {}),
    ]  # fmt: skip
    assert stream.finish_reasons == ["tool_calls"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_calls_alone_leave_no_content() -> None:
    stream, whole, message, _ = await both(WEATHER, {})
    assert stream == whole
    assert message["content"] is None
    assert message["tool_calls"][0]["type"] == "function"


async def test_without_a_call_it_is_an_answer_as_any() -> None:
    stream, whole, message, _ = await both("It rains.", {})
    assert stream == whole
    assert message["content"] == "It rains." and "tool_calls" not in message
    assert stream.finish_reasons == ["stop"]


async def test_a_vocabulary_without_the_markers_spells_them_in_text() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    body = {"messages": MESSAGES, "tools": TOOLS}
    async with http_node(
        scripts=[f"I ask. {call}", "It rains."], context=1200, tool_call_parser="hermes"
    ) as node:
        answers = [await node.client.post(CHAT, json={**body, "seed": i}) for i in range(2)]
    first, second = [answer.json()["choices"][0]["message"] for answer in answers]
    assert first["content"].strip() == "I ask."
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["get_time"]
    assert second["content"] == "It rains." and "tool_calls" not in second


async def test_a_call_that_the_model_breaks_off_is_a_call_all_the_same() -> None:
    """The client was told of it; agents look at the finish reason first."""
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": '
    stream, whole, message, _ = await both(broken, {})
    assert stream == whole
    assert stream.finish_reasons == ["tool_calls"]
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


async def test_a_call_that_is_cut_off_ends_with_length() -> None:
    stream, whole, message, _ = await both(WEATHER, {"max_tokens": 40})
    assert stream == whole
    assert stream.finish_reasons == ["length"]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments and '{"city": "Köln", "days": 2}'.startswith(arguments)


async def test_a_call_goes_back_into_the_prompt_whatever_its_strings_are() -> None:
    """Half a character, a line break and a backslash: no JSON, or no text, by the letter."""
    arguments = '{"city": "a\\ud83d\nb\\d"}'
    script = WEATHER.replace('{"city": "Köln", "days": 2}', arguments)
    async with one_node(script) as node:
        body = {"messages": MESSAGES, "tools": TOOLS}
        message = (await node.client.post(CHAT, json=body)).json()["choices"][0]["message"]
        told = message["tool_calls"][0]["function"]["arguments"]
        assert json.loads(told) == {"city": "a\ufffd\nb\\d"}
        result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
        answer = await node.client.post(CHAT, json={"messages": [*MESSAGES, message, result]})
        assert answer.status_code == 200, answer.text
        last = list(node.engine.requests.values())[-1].request.spec.prompt_token_ids
    assert '{"city": "a\ufffd\\nb\\\\d"}' in node.tokenizer.decode(last)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_allowed_tools_are_called_and_the_prompt_stays() -> None:
    async with one_node(WEATHER) as node:
        body = {"messages": MESSAGES, "tools": TOOLS}
        for choice in ("auto", allowed("auto", "get_time"), allowed("required", "get_time")):
            answer = await node.client.post(CHAT, json={**body, "tool_choice": choice})
            assert answer.status_code == 200, answer.text
        free, held, must = (fake.request.spec for fake in node.engine.requests.values())
        assert free.prompt_token_ids == held.prompt_token_ids == must.prompt_token_ids
        for spec in (held, must):
            assert "get_time" in spec.sampling.grammar
            assert "get_weather" not in spec.sampling.grammar
        assert not free.sampling.grammar
        for choice, param in (
            (allowed("none", "get_time"), "tool_choice.allowed_tools.mode"),
            (allowed("auto", "other"), "tool_choice.allowed_tools.tools"),
            (allowed("auto"), "tool_choice.allowed_tools.tools"),
            ({"type": "allowed_tools", "tools": []}, "tool_choice.allowed_tools"),
        ):
            refused = await node.client.post(CHAT, json={**body, "tool_choice": choice})
            assert refused.json()["error"]["param"] == param


async def test_a_function_that_was_not_offered_is_content() -> None:
    script = WEATHER.replace("get_weather", "launch")
    stream, whole, message, _ = await both(script, {})
    assert stream == whole
    assert "launch" in message["content"] and "tool_calls" not in message


async def test_with_choice_none_calls_are_text() -> None:
    stream, whole, message, _ = await both(WEATHER, {"tool_choice": "none"})
    assert stream == whole
    assert message["content"] == WEATHER


async def test_tokens_and_logprobs_are_all_there_once() -> None:
    fields = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    stream, whole, _, _ = await both(SCRIPT, fields)
    assert stream == whole
    ids = thinking_tokenizer().encode(SCRIPT + "</s>")
    assert stream.token_ids == ids and len(stream.logprobs) == len(ids)


@pytest.mark.parametrize("tokens_per_output", [2, 3, 7, 100])
async def test_however_many_tokens_come_at_once(tokens_per_output: int) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": 0, "stream": True}
    async with one_node() as node:
        headers = {"x-request-id": "same"}
        one = accumulated(
            chunks_of((await node.client.post(CHAT, json=body, headers=headers)).text)
        )
        node.engine.tokens_per_output = tokens_per_output
        several = accumulated(chunks_of((await node.client.post(CHAT, json=body)).text))
    for call in one[0].calls + several[0].calls:
        call.pop("id")
    assert several == one


async def test_long_answers_are_parsed_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    form_body = ChatFormat.body

    def body(self: ChatFormat, *args: Any) -> bytes:
        threads.append(threading.current_thread())
        return form_body(self, *args)

    monkeypatch.setattr(ChatFormat, "body", body)
    async with one_node() as node:
        for most in (1000, 100):
            monkeypatch.setattr("decode_node.answer.answer._MANY_TOKENS", most)
            asked = {"messages": MESSAGES, "tools": TOOLS}
            (choice,) = (await node.client.post(CHAT, json=asked)).json()["choices"]
            assert len(choice["message"]["tool_calls"]) == 2
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_what_needs_a_parser_is_refused_by_name() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    async with one_node(tool_call_parser="none") as node:
        error = (await node.client.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        response = await node.client.post(CHAT, json={**body, "tool_choice": "none"})
        assert response.status_code == 200, "tools that may not be called need none"
    async with one_node(enable_auto_tool_choice=False) as node:
        error = (await node.client.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "tool_choice"
        assert "--enable-auto-tool-choice" in error["message"]


async def test_the_official_client_runs_a_loop_of_calls() -> None:
    async with one_node() as node, live(node) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "seed": 0}
        answer = await client.chat.completions.create(messages=MESSAGES, **options)
        message = answer.choices[0].message
        assert message.tool_calls is not None and len(message.tool_calls) == 2
        async with client.chat.completions.stream(messages=MESSAGES, **options) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0].message
        assert final.tool_calls is not None
        for call, streamed in zip(message.tool_calls, final.tool_calls, strict=True):
            assert call.type == "function" and streamed.type == "function"
            assert call.function.arguments == streamed.function.arguments
            assert call.function.name == streamed.function.name
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            for call in message.tool_calls
        ]
        history: Any = [*MESSAGES, message.model_dump(), *results]
        after = await client.chat.completions.create(messages=history, **options)
        assert after.usage is not None and after.usage.prompt_tokens > 0
        prompt = node.tokenizer.decode(
            list(node.engine.requests.values())[-1].request.spec.prompt_token_ids
        )
        assert '{"city": "Köln", "days": 2}' in prompt
        await client.close()


def test_ids_have_the_form_that_the_model_takes_back() -> None:
    assert CallIds("a").name(0, 0, "f") == CallIds("a").name(0, 0, "g")
    names = {CallIds(a).name(c, i, "f") for a in "ab" for c in (0, 1) for i in (0, 1)}
    assert len(names) == 8 and all(name.startswith("call_") for name in names)
    assert CallIds("a", "kimi_k2", 3).name(0, 1, "f") == "functions.f:4"
    assert len(CallIds("a", "mistral").name(0, 0, "f")) == 9
    assert CallIds("a", "mistral").name(0, 0, "f").isalnum()


def test_every_parser_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/tool_calls.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w-]+)`", page.split("## What is what")[0]))
    families = (*CALL_FAMILIES, *REASONING_FAMILIES)
    assert {name for family in families for name in family.names} <= named
