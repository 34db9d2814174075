"""Anthropic's Messages API, as the `anthropic` client uses it: blocks, events, errors."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import anthropic
import pytest

from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.messages.messages import MessagesRequest
from tests.decode_node.chat_clients import SCRIPT, WEATHER, groups, thinking_tokenizer
from tests.decode_node.http_node import http_node, live
from tests.decode_node.test_journal import ask, data_of
from tests.decode_node.test_responses_api import shown

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hello"}
TOOLS: list[Any] = [
    {"name": name, "description": "Ask.", "input_schema": {"type": "object"}}
    for name in ("get_weather", "get_time")
]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": [USER], "tools": TOOLS}


def one_node(script: str = SCRIPT, **settings: Any) -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=[script], context=1200, **settings)


def client_of(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def events_of(text: str) -> list[dict[str, Any]]:
    """Returns the data of a stream's events, whose names must be right."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message as a client has it that joins deltas."""
    message: dict[str, Any] = {}
    events = copy.deepcopy(events)
    is_open, arguments = False, ""
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                _, (name, text) = event["delta"].items()
                if name == "partial_json":
                    arguments += text
                else:
                    message["content"][-1][name] += text
            case "content_block_stop":
                assert is_open
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert events[-1] == {"type": "message_stop"}
    return message


async def test_the_official_client_reads_a_whole_message() -> None:
    async with one_node() as node, live(node) as url:
        client = client_of(url)
        message = await client.messages.create(**ASK, system="be kind")
        thought, text, weather, time = message.content
        assert thought.type == "thinking" and thought.thinking == "\nask\n" and thought.signature
        assert text.type == "text" and text.text == "\n\nI look."
        assert weather.type == "tool_use" and weather.name == "get_weather"
        assert weather.input == {"city": "Köln", "days": 2}
        assert time.type == "tool_use" and time.input == {} and time.id != weather.id
        assert message.stop_reason == "tool_use"
        prompt = node.engine.only.request.spec.prompt_token_ids
        assert message.usage.input_tokens == len(prompt)
        assert message.usage.output_tokens == len(node.engine.scripts[0])
        assert "system:be kinduser:hello" in node.tokenizer.decode(prompt)
        counted = await client.messages.count_tokens(
            model="tiny", messages=ASK["messages"], tools=TOOLS, system="be kind"
        )
        assert counted.input_tokens == len(prompt)
        await client.close()


async def test_usage_tells_how_many_tokens_are_thoughts() -> None:
    """As many as chats tell, of a whole message and of a stream."""
    async with one_node() as node:
        asked = {"messages": [USER], "max_tokens": 500}
        chat = (await node.client.post("/v1/chat/completions", json=asked)).json()
        thoughts = chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
        whole = (await node.client.post("/v1/messages", json=asked)).json()
        assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": thoughts}
        stream = (await node.client.post("/v1/messages", json={**asked, "stream": True})).text
        assert (
            thoughts > 0 and f'"output_tokens_details":{{"thinking_tokens":{thoughts}}}' in stream
        )


async def test_the_official_client_runs_a_loop_of_calls() -> None:
    async with one_node() as node, live(node) as url:
        client = client_of(url)
        async with client.messages.stream(**ASK) as stream:
            events = [event async for event in stream]
            message = await stream.get_final_message()
        started = next(event for event in events if event.type == "message_start")
        assert started.message.usage.input_tokens == message.usage.input_tokens > 0
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Köln", "days": 2}, {}]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": i == 1}
            for i, call in enumerate(calls)
        ]
        turns: list[Any] = [
            USER,
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]},
        ]
        await client.messages.create(**{**ASK, "messages": turns})
        last = list(node.engine.requests.values())[-1].request.spec.prompt_token_ids
        prompt = node.tokenizer.decode(last)
        assert '{"city": "Köln", "days": 2}' in prompt
        assert prompt.endswith("tool:raintool:Error: rainuser:and now?")
        await client.close()


NEARLY_VALID = (
    '<tool_call>\n{"name": "get_weather", "arguments":\n{"city": '
    '"a\nb\t\x01\\d+ \\ud83d \\ude00\\uD83D\\ude00", "p\\q": 123456789012345678901234567890}}'
    "\n</tool_call>"
)
"""A call whose strings no JSON parser takes: line breaks, no escapes, halves of characters."""
NEARLY = {"city": "a\nb\t\x01\\d+ \ufffd \ufffd😀", "p\\q": 123456789012345678901234567890}


@pytest.mark.parametrize("tokens_per_output", [1, 2, 5, 1000])
async def test_the_input_of_calls_is_valid_json(tokens_per_output: int) -> None:
    async with one_node(NEARLY_VALID) as node, live(node) as url:
        node.engine.tokens_per_output = tokens_per_output
        client = client_of(url)
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
        await client.close()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["tool_use"]
        assert message.content[0].input == NEARLY


@pytest.mark.parametrize(
    "arguments", ['{"city": "x",}', '{"city": "a" b"}', '{"city": "x" "days": 2}', "{,}"]
)
async def test_what_is_no_object_is_never_an_empty_one(arguments: str) -> None:
    script = WEATHER.replace('{"city": "Köln", "days": 2}', arguments)
    async with one_node(script) as node:
        whole = (await node.client.post(MESSAGES, json=ASK)).json()
        response = await node.client.post(MESSAGES, json={**ASK, "stream": True})
    blocks = [block for block in whole["content"] if block["type"] == "tool_use"]
    deltas = [event["delta"] for event in events_of(response.text) if "delta" in event]
    told = "".join(delta.get("partial_json", "") for delta in deltas)
    if blocks:
        assert blocks[0]["input"] == {"INVALID_JSON": told} and told
    else:
        assert arguments in "".join(block.get("text", "") for block in whole["content"])


@pytest.mark.parametrize(
    ("script", "fields", "stop"),
    [
        ("It rains.", {}, ("end_turn", None)),
        (SCRIPT, {"max_tokens": 30}, ("max_tokens", None)),
        ("It rains. Now.", {"stop_sequences": ["Now"]}, ("stop_sequence", "Now")),
        (WEATHER, {"tool_choice": {"type": "none"}}, ("end_turn", None)),
        (WEATHER, {"thinking": {"type": "disabled"}}, ("tool_use", None)),
    ],
)
async def test_streams_and_whole_messages_say_the_same(
    script: str, fields: dict[str, Any], stop: tuple[str, str | None]
) -> None:
    body = {**ASK, **fields}
    async with one_node(script) as node:
        whole = (await node.client.post(MESSAGES, json=body)).json()
        response = await node.client.post(MESSAGES, json={**body, "stream": True})
    events = events_of(response.text)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message = joined(events)
    for one in (message, whole):
        one.pop("id")
        for block in one["content"]:
            block.pop("id", None), block.pop("signature", None)
    assert message == whole
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop


async def test_a_last_turn_of_the_assistant_is_continued() -> None:
    turns = [USER, {"role": "assistant", "content": "The answer is"}]
    body = {"max_tokens": 20, "messages": turns}
    async with one_node(" rain.") as node:
        message = (await node.client.post(MESSAGES, json=body)).json()
        prompt = node.tokenizer.decode(node.engine.only.request.spec.prompt_token_ids)
    assert prompt == "user:helloassistant:The answer is"
    assert message["content"] == [{"type": "text", "text": " rain."}]


def test_choices_and_thinking_are_those_of_chats() -> None:
    def chat(**fields: Any) -> Any:
        return parse_body(json.dumps({**ASK, **fields}).encode(), MessagesRequest).to_chat()

    use = chat(tool_choice={"type": "any", "disable_parallel_tool_use": True}).tool_use()
    assert (use.mode, use.is_parallel) == ("required", False)
    use = chat(tool_choice={"type": "tool", "name": "get_time"}).tool_use()
    assert (use.mode, use.name) == ("named", "get_time")
    assert chat().template_variables == {}
    on = {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"}
    assert chat(thinking={"type": "enabled"}).template_variables == on
    own = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False, "x": 1}}
    assert chat(**own).template_variables == on | own["chat_template_kwargs"]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    assert chat(context_management={"edits": edits}).messages == chat().messages
    assert chat(output_config={"effort": "low"}).template_variables == {"reasoning_effort": "low"}


async def test_a_model_that_does_not_think_stays_within_any_budget() -> None:
    """The API has no thinking without one, so that clients send it to every model."""
    budget = {"thinking": {"type": "enabled", "budget_tokens": 4}}
    body = {"max_tokens": 8, "messages": [USER], **budget}
    async with http_node() as node:
        assert (await node.client.post(MESSAGES, json=body)).status_code == 200
        assert node.engine.only.request.spec.sampling.grammar == ""
    async with one_node() as node:
        assert (await node.client.post(MESSAGES, json=body)).status_code == 200
        assert "{0,4}" in node.engine.only.request.spec.sampling.grammar


async def test_wherever_a_stream_is_cut_it_goes_on() -> None:
    body = {**ASK, "seed": 0, "stream": True}
    async with one_node() as first, one_node() as second, one_node() as third:
        third.engine.tokens_per_output = 3
        whole = groups(await ask(first, MESSAGES, body))
        expected = events_of(shown(whole))
        for cut in range(1, len(whole)):
            rest = groups(await ask(second, MESSAGES, body, whole[:cut]))
            assert events_of(shown([*whole[:cut], *rest])) == expected
            rest = groups(await ask(third, MESSAGES, body, whole[:cut]))
            assert joined(events_of(shown([*whole[:cut], *rest]))) == joined(expected)


async def test_a_whole_message_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.answer.answer.JOURNAL_INTERVAL_S", 0.0)
    async with one_node() as first, one_node() as second:
        whole = await ask(first, MESSAGES, {**ASK, "seed": 0})
        for cut in range(1, len(whole) - 1, 5):
            rest = await ask(second, MESSAGES, {**ASK, "seed": 0}, whole[:cut])
            assert data_of(rest[-2]) == data_of(whole[-2])


IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
FILE = {"type": "file", "file_id": "f"}


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (turn("user", {"type": "audio"}), "messages.0.content.0.type"),
    (turn("user", {"type": "document"}), "messages.0.content.0.document.source: "),
    (turn("assistant", {"type": "tool_reference"}), "messages.0.content.0.tool_name"),
    (turn("user", {"type": "image"}), "messages.0.content.0.image.source: "),
    (turn("user", {"type": "image", "source": FILE}), "messages.0.content.0.image.source: "),
    (turn("user", {"type": "text", "text": "a"}, IMAGE), "messages.0.content.1.image: "),
    ({"system": "s", **turn("user", IMAGE)}, "messages.0.content.0.image: "),
    (turn("assistant", IMAGE), "messages.0.content.0.type"),
    (
        turn("user", {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}),
        "messages.0.content.0.tool_result.content.0.image: ",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages.0.content.0.tool_use_id",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_all"}]}}, "context_management"),
    ({"context_management": {"edits": 3}}, "context_management"),
    ({"output_config": {"format": "json"}}, "output_config.format must be an object"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
    ({"output_format": {"type": "xml"}}, "output_format.type must be"),
    ({"output_config": {"effort": 3}}, "output_config.effort must be a string"),
    ({"temperature": 200.0}, "temperature"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    body = {k: v for k, v in {**ASK, **fields}.items() if v is not None}
    async with one_node() as node:
        for stream in (False, True):
            response = await node.client.post(MESSAGES, json={**body, "stream": stream})
            assert response.status_code == 400, response.text
            error = response.json()
            assert error["type"] == "error", error
            assert error["error"]["type"] == "invalid_request_error"
            assert param in error["error"]["message"]
        assert not node.engine.requests


async def test_errors_reach_the_official_client_as_its_own() -> None:
    async with one_node(api_keys="key", auto=False) as node, live(node) as url:
        for key, kind in (
            ("wrong", anthropic.AuthenticationError),
            ("key", anthropic.NotFoundError),
        ):
            client = client_of(url, key)
            with pytest.raises(kind) as caught:
                await client.messages.create(**{**ASK, "model": "other"})
            assert caught.value.body["error"]["type"] in (
                "authentication_error", "not_found_error",
            )  # fmt: skip
            await client.close()
        client = client_of(url, "key")
        node.engine.on_generate = lambda fake: node.engine.produce(fake, 9)
        stream = await client.messages.create(**ASK, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            async for _ in stream:
                node.engine.die()
        await client.close()


async def test_what_exceeds_the_context_is_told_in_words_that_agents_look_for() -> None:
    """They ask for a shorter answer, or compact the conversation, by these."""
    async with one_node(strict_max_tokens=True) as node:
        body = {**ASK, "max_tokens": 1200}
        refused = await node.client.post(MESSAGES, json=body)
        message = refused.json()["error"]["message"]
        asked = re.search(
            r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", message
        )
        assert refused.status_code == 400 and asked is not None, message
        num_prompt, num_answer, context = map(int, asked.groups())
        assert (num_answer, context) == (1200, 1200) and num_prompt > 0
        requested = (
            f"requested {num_answer} output tokens and your prompt contains {num_prompt} input"
        )
        assert f"maximum context length is {context} tokens" in message and requested in message
        left = {**ASK, "max_tokens": context - num_prompt}
        assert (await node.client.post(MESSAGES, json=left)).status_code == 200
        long = {**ASK, "messages": [{"role": "user", "content": "hello " * 1300}]}
        refused = await node.client.post(MESSAGES, json=long)
        message = refused.json()["error"]["message"]
        found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
        assert refused.status_code == 400 and found is not None, message
        assert int(found[1]) > int(found[2]) == 1199
        assert "maximum context length is 1200 tokens" in message


async def test_an_answer_that_the_context_cuts_says_so() -> None:
    """Agents ask for 32,000 tokens of any model; prompts that are too long must be refused."""
    async with one_node("so on, " * 1200) as node:
        body = {**ASK, "max_tokens": 32_000}
        whole = (await node.client.post(MESSAGES, json=body)).json()
        streamed = await node.client.post(MESSAGES, json={**body, "stream": True})
        message = joined(events_of(streamed.text))
        for answer in (whole, message):
            usage = answer["usage"]
            assert answer["stop_reason"] == "model_context_window_exceeded"
            assert usage["input_tokens"] + usage["output_tokens"] == 1200
        left = usage["output_tokens"]
        fits = (await node.client.post(MESSAGES, json={**ASK, "max_tokens": left})).json()
        assert fits["stop_reason"] == "max_tokens" and fits["content"] == whole["content"]
        long = {**body, "messages": [{"role": "user", "content": "hello " * 1300}]}
        refused = await node.client.post(MESSAGES, json=long)
        assert "prompt is too long" in refused.json()["error"]["message"]
