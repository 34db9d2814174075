"""The Responses API, as the `openai` client uses it: items, events, what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.history import history
from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.responses.responses import ResponsesRequest
from edge.http import headers as names
from edge.http.answers.kept_response import KeptResponse
from edge.http.errors import BadRequest
from engine.models.config.sampling_defaults import NO_DEFAULTS
from tests.decode_node.chat_clients import groups, thinking_tokenizer
from tests.decode_node.http_node import HttpNode, http_node, live
from tests.decode_node.test_journal import ask, data_of

RESPONSES = "/v1/responses"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
THINKING = "<think>\nthe dog → größer\n</think>\n\nthe fox"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def one_node(script: str = THINKING, **settings: Any) -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=[script], **settings)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def events_of(text: str) -> list[dict[str, Any]]:
    """Returns the data of a stream's events, whose names and numbers must be right."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items as a client has them that joins deltas; `done` must say the same."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "response.content_part.added":
            items[-1]["content"].append(dict(event["part"]))
        elif kind.endswith("_text.delta"):
            part = items[-1]["content"][event["content_index"]]
            part["text"] += event["delta"]
            if "logprobs" in part:
                part["logprobs"] += event["logprobs"]
        elif kind.endswith("_text.done"):
            part = items[-1]["content"][event["content_index"]]
            assert part["text"] == event["text"]
            assert part.get("logprobs") == event.get("logprobs")
        elif kind == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert items[-1]["arguments"] == event["arguments"]
        elif kind == "response.custom_tool_call_input.delta":
            items[-1]["input"] += event["delta"]
        elif kind == "response.custom_tool_call_input.done":
            assert items[-1]["input"] == event["input"]
        elif kind == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items


async def test_the_official_client_reads_a_whole_answer() -> None:
    async with one_node() as node, live(node) as url:
        client = client_of(url)
        response = await client.responses.create(
            model="tiny", input="hello", instructions="be kind", metadata={"a": "b"}, store=False
        )
        assert response.status == "completed" and response.output_text == "\n\nthe fox"
        thought, message = response.output
        assert thought.type == "reasoning" and thought.content is not None
        assert thought.content[0].text == "\nthe dog → größer\n"
        assert message.type == "message" and message.status == "completed"
        assert response.instructions == "be kind" and response.metadata == {"a": "b"}
        usage = response.usage
        assert usage is not None and usage.output_tokens == len(node.engine.scripts[0])
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        prompt = node.engine.only.request.spec.prompt_token_ids
        assert usage.input_tokens == len(prompt)
        assert node.tokenizer.decode(prompt) == "system:be kinduser:hello"
        await client.close()


async def test_the_official_client_joins_a_stream() -> None:
    async with one_node() as node, live(node) as url:
        client = client_of(url)
        async with client.responses.stream(model="tiny", input="hello") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "\n\nthe fox"
        kinds = [event.type for event in events]
        assert kinds[:3] == [
            "response.created", "response.in_progress", "response.output_item.added",
        ]  # fmt: skip
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 2
        whole = await client.responses.create(model="tiny", input="hello")
        assert [item.type for item in whole.output] == [item.type for item in final.output]
        await client.close()


async def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    body = {"input": "hello", "max_output_tokens": 4}
    async with one_node() as node:
        response = (await node.client.post(RESPONSES, json=body)).json()
        events = events_of((await node.client.post(RESPONSES, json={**body, "stream": True})).text)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert events[-1]["type"] == "response.incomplete"
    assert joined(events) == events[-1]["response"]["output"]


def chat_of(body: dict[str, Any]) -> Any:
    request = parse_body(json.dumps(body).encode(), ResponsesRequest)
    with request.named_fields():
        return request.to_chat()


def test_items_of_one_turn_become_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [
            {"type": "reasoning_text", "text": "why"}
        ]},
        {"type": "message", "role": "assistant", "id": "msg", "status": "completed", "content": [
            {"type": "output_text", "text": "I ask", "annotations": []}
        ]},
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "sun"}
        ]},
        {**call, "call_id": "c3"},
    ]  # fmt: skip
    chat = chat_of({"input": items, "instructions": "s"})
    messages = history(chat.messages, TemplateForms(reasoning="reasoning_content"))
    assert [m["role"] for m in messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    turn = messages[2]
    assert (turn["reasoning_content"], turn["content"]) == ("why", "I ask")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert [(m["tool_call_id"], m["content"]) for m in messages[3:5]] == [
        ("c1", "rain"), ("c2", "sun"),
    ]  # fmt: skip


def test_an_item_whose_type_is_null_is_a_message() -> None:
    item = {"role": "user", "content": "a"}
    assert chat_of({"input": [{**item, "type": None}]}) == chat_of({"input": [item]})


def test_tools_and_forms_are_those_of_chats() -> None:
    body = {
        "input": "a",
        "tools": [{**TOOL, "strict": True, "description": None}],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none", "summary": "auto"},
        "max_output_tokens": 5,
    }
    chat = chat_of(body)
    use = chat.tool_use()
    assert (use.mode, use.name, use.is_parallel) == ("named", "get_weather", False)
    assert use.tools[0].strict and use.tools[0].parameters == {"type": "object"}
    assert (chat.reasoning_effort, chat.wanted_max_tokens) == ("none", 5)


def test_what_vllm_adds_is_as_in_chats() -> None:
    added = {
        "logit_bias": {"5": -1.5},
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_reasoning": False,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "cache_salt": "a",
        "extra_key": "b",
    }
    chat = chat_of({"input": "a", **added})
    assert {name: getattr(chat, name) for name in added} == added
    assert chat.salt == "a/b"


def test_items_change_how_answers_are_made_from_there_on() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    high = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    formed = {"type": "configuration_update", "id": "c", "text": {"format": form}}
    user = {"role": "user", "content": "a"}
    body = {"input": [user, high, formed, user], "reasoning": {"effort": "low"}}
    chat = chat_of(body)
    assert chat.reasoning_effort == "high"
    assert chat.response_format.model_dump(exclude_none=True)["type"] == "json_schema"
    assert [m.content for m in chat.messages] == ["a", "a"]
    plain = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    assert chat_of({"input": [formed, plain, user]}).response_format.type == "text"
    request = parse_body(json.dumps(body).encode(), ResponsesRequest)
    echoed = request.echoed_fields(NO_DEFAULTS)
    assert (echoed["reasoning"]["effort"], echoed["text"]["format"]) == ("high", form)
    with pytest.raises(BadRequest) as refusal:
        chat_of({"input": [user, {**high, "reasoning": {"effort": 3}}]})
    assert refusal.value.param == "input.1.reasoning.effort"


def test_a_stored_prompt_is_led_to_its_text() -> None:
    """It may come without an input, of which nothing need be said then."""
    with pytest.raises(BadRequest, match="no prompts are stored here; send its text") as refusal:
        chat_of({"prompt": {"id": "p"}})
    assert refusal.value.code == "unsupported_parameter"


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


def user_with(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input"),
    ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input.0.action"),
    (user_with({"type": "input_file", "file_id": "f"}), "input.0.content.0"),
    (user_with({"type": "input_image"}), "input.0.content.0.image_url"),
    (user_with({"type": "input_image", "file_id": "f"}), "input.0.content.0.file_id"),
    (user_with({"type": "input_text", "text": "a"}, IMAGE), "input.0.content.1"),
    ({"instructions": "b", **user_with(IMAGE)}, "input.0.content.0"),
    ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input.0.content"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]},
        "input.0.output.0",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input.0.output"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input.0.summary.0"),
    ({"input": [{"type": "reasoning", "content": [IMAGE]}]}, "input.0.content"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"content": "a"}]}, "input.0.role"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "c"}, "conversation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "truncation": "middle"}, "truncation"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"prompt": {"id": "p", "version": "2"}}, "prompt"),
    ({"input": "a", "top_logprobs": 200}, "top_logprobs"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools.0.name"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": "x"}, "max_output_tokens"),
    ({"input": "a" * 100_000}, "input"),
    ({"input": "a", "temperature": -1}, "temperature"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with one_node() as node:
        for stream in (False, True):
            response = await node.client.post(RESPONSES, json={**body, "stream": stream})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param, response.text
        assert not node.engine.requests


async def test_a_check_refuses_what_would_not_be_answered_and_answers_nothing() -> None:
    headers = {names.RESPONSE: KeptResponse(is_check=True).header()}
    schema = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    bad_schema = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    bodies = [body for body, _ in REFUSED] + [{"input": "a", **bad_schema}]
    async with one_node() as node:
        for body in bodies:
            refused = await node.client.post(RESPONSES, json=body)
            checked = await node.client.post(INPUT_TOKENS, json=body, headers=headers)
            assert (checked.status_code, checked.json()) == (400, refused.json())
        good = {"input": "a b", "max_output_tokens": 3, "stream": True}
        checked = await node.client.post(INPUT_TOKENS, json=good, headers=headers)
        counted = await node.client.post(INPUT_TOKENS, json=good)
        assert checked.status_code == 200 and checked.json() == counted.json()
        assert not node.engine.requests


async def test_what_is_told_back_is_what_was_sampled_by() -> None:
    advice = '{"temperature": 0.6, "top_p": 0.95}'
    async with one_node(override_generation_config=advice) as node:
        for body, expected in (
            ({}, (0.6, 0.95)),
            ({"temperature": 0, "top_p": None}, (0.0, 0.95)),
            ({"top_p": 1.0}, (0.6, 1.0)),
        ):
            told = (await node.client.post(RESPONSES, json={"input": "a", **body})).json()
            sampling = list(node.engine.requests.values())[-1].request.spec.sampling
            assert (sampling.temperature, sampling.top_p) == expected
            assert (told["temperature"], told["top_p"]) == expected


def test_errors_of_the_chat_have_the_names_of_this_api() -> None:
    with pytest.raises(BadRequest) as caught:
        chat_of({"input": "a", "text": {"format": {"type": "x"}}})
    assert caught.value.param == "text.format.type"


async def test_errors_of_a_schema_say_where_this_api_has_it() -> None:
    schema = {"type": "object", "properties": {"a": {"minimum": 1 << 60}}}
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    async with one_node() as node:
        body = {"input": "a", "text": {"format": form}}
        error = (await node.client.post(RESPONSES, json=body)).json()["error"]
        assert error["param"] == "text.format.schema"
        assert error["message"].startswith("text.format.schema")
        assert "whole number beyond" in error["message"]


async def broken(node: HttpNode) -> list[dict[str, Any]]:
    node.engine.on_generate = lambda fake: node.engine.produce(fake, 9)
    async with live(node) as url:
        client = client_of(url)
        found = []
        stream = await client.responses.create(model="tiny", input="hello", stream=True)
        async for event in stream:
            found.append(event.model_dump())
            node.engine.die()
        await client.close()
    return found


async def test_a_stream_that_breaks_off_says_that_it_failed() -> None:
    async with one_node(auto=False) as node:
        events = await broken(node)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_wherever_a_stream_is_cut_its_numbers_and_items_go_on() -> None:
    body = {"input": "hello", "seed": 0, "stream": True}
    async with one_node() as first, one_node() as second, one_node() as third:
        third.engine.tokens_per_output = 3
        whole = groups(await ask(first, RESPONSES, body))
        expected = events_of(shown(whole))
        assert joined(expected) == expected[-1]["response"]["output"]
        for cut in range(1, len(whole)):
            rest = await ask(second, RESPONSES, body, whole[:cut])
            assert events_of(shown([*whole[:cut], *groups(rest)])) == expected
            rest = await ask(third, RESPONSES, body, whole[:cut])
            found = events_of(shown([*whole[:cut], *groups(rest)]))
            assert joined(found) == joined(expected)
            assert found[-1]["response"] == expected[-1]["response"]


def shown(events: list[str]) -> str:
    """Returns what a client gets of a stream that a router has joined."""
    parts = [data_of(event) for event in events]
    return "".join(part + "\n\n" for part in parts if part)


async def test_a_whole_answer_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.answer.answer.JOURNAL_INTERVAL_S", 0.0)
    body = {"input": "hello", "seed": 0}
    async with one_node() as first, one_node() as second:
        whole = await ask(first, RESPONSES, body)
        assert whole[-1] == "data: [DONE]", "what tells a router that a body is complete"
        for cut in range(1, len(whole) - 1):
            rest = await ask(second, RESPONSES, body, whole[:cut])
            assert data_of(rest[-2]) == data_of(whole[-2])


async def test_log_probabilities_are_those_of_the_text() -> None:
    body = {"input": "hello", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    async with one_node() as node:
        whole = (await node.client.post(RESPONSES, json=body)).json()
        for size in (1, 5, 100):
            node.engine.tokens_per_output = size
            streamed = await node.client.post(RESPONSES, json={**body, "stream": True})
            items = joined(events_of(streamed.text))
            assert [item["content"] for item in items] == [
                item["content"] for item in whole["output"]
            ]
    part = whole["output"][1]["content"][0]
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert "logprobs" not in whole["output"][0]["content"][0]


@pytest.mark.parametrize("include", [None, []])
async def test_without_a_wish_there_are_no_log_probabilities(include: list[str] | None) -> None:
    async with one_node() as node:
        whole = (await node.client.post(RESPONSES, json={"input": "a", "include": include})).json()
        assert node.engine.only.request.spec.sampling.logprobs is None
    assert whole["output"][1]["content"][0]["logprobs"] == []


async def test_the_oldest_turns_are_left_out_of_an_input_that_is_too_long() -> None:
    turns = [
        item
        for i in range(40)
        for item in (
            {"role": "user", "content": f"question {i}"},
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i}"},
        )
    ]
    body = {"input": turns, "instructions": "be kind", "max_output_tokens": 9}
    async with one_node("so on, " * 1200) as node:
        refused = await node.client.post(RESPONSES, json=body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answer = await node.client.post(RESPONSES, json={**body, "truncation": "auto"})
        assert answer.json()["truncation"] == "auto"
        spec = node.engine.only.request.spec
        prompt = node.tokenizer.decode(spec.prompt_token_ids)
        assert prompt.startswith("system:be kinduser:question ") and "result 39" in prompt
        longer = len(node.tokenizer.encode("user:question 10assistant:None{}tool:result 10"))
        room = node.engine.config.model.max_model_len - len(spec.prompt_token_ids)
        assert 9 <= room < 9 + longer + 4
        context = node.engine.config.model.max_model_len
        usages = []
        for asked in (context // 2, 32_000):
            more = {**body, "truncation": "auto", "max_output_tokens": asked}
            cut = (await node.client.post(RESPONSES, json=more)).json()
            assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
            usages.append(cut["usage"])
        assert usages[0]["input_tokens"] == usages[1]["input_tokens"] > 0
        assert usages[1]["total_tokens"] == context
        counted = await node.client.post(f"{RESPONSES}/input_tokens", json={**body, "input": "a"})
        assert counted.json()["object"] == "response.input_tokens"
        assert (await node.client.post(RESPONSES, json={**body, "input": "a"})).status_code == 200
        few = list(node.engine.requests.values())[-1].request.spec.prompt_token_ids
        assert counted.json()["input_tokens"] == len(few)
        one = {**body, "truncation": "auto", "input": "a" * 100_000}
        refused = await node.client.post(RESPONSES, json=one)
        assert refused.json()["error"]["param"] == "input"
