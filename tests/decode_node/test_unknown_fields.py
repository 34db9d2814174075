"""Fields of no known name are ignored and counted, or refused where the operator wants it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.history import history
from decode_node.http.ignored_fields import IgnoredFields
from decode_node.protocol.bodies.body import StrictBody
from decode_node.protocol.bodies.not_built import NOT_BUILT
from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.messages.messages import MessagesRequest
from decode_node.protocol.responses.responses import ResponsesRequest
from decode_node.protocol.tokens.generate import GenerateRequest
from decode_node.protocol.tokens.sglang import SGLangRequest
from edge.http.errors import BadRequest
from tests.decode_node.chat_clients import thinking_tokenizer
from tests.decode_node.http_node import http_node

USER = {"role": "user", "content": "hi"}
LOGGER = "decode_node.http.ignored_fields"
URLS = {"/v1/completions": {"prompt": [1]}, "/v1/chat/completions": {"messages": [USER]}}
COUNTER = "tandem_ignored_fields_total"


@pytest.mark.parametrize("url", URLS)
async def test_unknown_fields_are_ignored_counted_and_named_once(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    body = {**URLS[url], "max_tokens": 1, "temprature": 0.5, "stream_options": {"typo": 1}}
    async with http_node() as node:
        for times in (1, 2):
            assert (await node.client.post(url, json=body)).status_code == 200
            assert (await node.metrics())[COUNTER] == 2 * times
    named = [record.args for record in caplog.records if record.name == LOGGER]
    assert sorted(named) == [("stream_options.typo",), ("temprature",)]


@pytest.mark.parametrize("url", URLS)
async def test_strict_fields_refuses_them(url: str) -> None:
    async with http_node(strict_fields=True) as node:
        for extra, param in (
            ({"temprature": 0.5}, "temprature"),
            ({"stream_options": {"typo": 1}}, "stream_options.typo"),
        ):
            response = await node.client.post(url, json={**URLS[url], **extra})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, "unknown_parameter")
        assert not node.engine.requests
        assert (await node.metrics())[COUNTER] == 0


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (ResponsesRequest, "text.format"),
        (MessagesRequest, "output_config.format"),
        (GenerateRequest, "sampling_params.structured_outputs"),
        (SGLangRequest, "sampling_params.json_schema, regex, ebnf"),
    ],
)
def test_structured_output_by_another_apis_name_is_led_to_its_own(
    kind: type[StrictBody], place: str
) -> None:
    named = {"response_format": {"type": "json_object"}}
    bodies: dict[type[StrictBody], list[dict[str, Any]]] = {
        ResponsesRequest: [{"input": "hi", **named}],
        MessagesRequest: [{"messages": [USER], "max_tokens": 1, **named}],
        GenerateRequest: [
            {"token_ids": [1], "sampling_params": {}, **named},
            {"token_ids": [1], "sampling_params": named},
        ],
        SGLangRequest: [
            {"text": "hi", "sampling_params": {"grammar": "root ::= 'a'"}},
            {"text": "hi", "sampling_params": named},
        ],
    }
    for body in bodies[kind]:
        with pytest.raises(BadRequest, match=f"is not supported: .*{place}") as one:
            parse_body(_json(body), kind)
        assert "/v1/" not in one.value.message


@pytest.mark.parametrize("name", sorted(NOT_BUILT.keys() - ChatCompletionRequest.model_fields))
def test_what_is_known_but_not_built_is_refused_by_name(name: str) -> None:
    for neutral in (None, False, 0, "", [], *NOT_BUILT[name].neutral):
        if neutral is NOT_BUILT[name].asking:
            continue
        parse_body(_json({"messages": [USER], name: neutral}), ChatCompletionRequest)
    with pytest.raises(BadRequest, match=name) as refusal:
        parse_body(_json({"messages": [USER], name: 7}), ChatCompletionRequest)
    assert (refusal.value.param, refusal.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", ["separate_reasoning", "stream_reasoning"])
async def test_false_asks_for_reasoning_within_the_text_where_a_model_thinks(name: str) -> None:
    """SGLang's clients send it to every model."""
    url, body = "/v1/chat/completions", {"messages": [USER], "max_tokens": 1}
    async with http_node(strict_fields=True) as node:
        assert (await node.client.post(url, json={**body, name: False})).status_code == 200
    async with http_node(tokenizer=thinking_tokenizer(), context=1200) as node:
        response = await node.client.post(url, json={**body, name: False})
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert (await node.client.post(url, json={**body, name: True})).status_code == 200


def test_a_search_of_the_web_is_asked_for_by_an_empty_object() -> None:
    """OpenAI's own example of it is one."""
    with pytest.raises(BadRequest, match="searches nothing"):
        parse_body(_json({"messages": [USER], "web_search_options": {}}), ChatCompletionRequest)
    parse_body(_json({"messages": [USER], "audio": {}}), ChatCompletionRequest)


def test_names_that_clients_invent_fill_neither_log_nor_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    counts: list[int] = []
    fields = IgnoredFields(counts.append, refuses=False)
    fields.note([f"name{i}" for i in range(5000)])
    assert len(caplog.records) == 256
    caplog.clear()
    fields = IgnoredFields(counts.append, refuses=False)
    fields.note(["my secret prompt", "x" * 65, "line\nfeed", "plain"])
    assert counts == [5000, 4]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert not any("secret" in text or "\n" in text or "xx" in text for text in texts)


def test_extra_keys_of_messages_go_to_the_template_and_are_no_unknown_fields() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{**USER, "weight": 1}, {"role": "user", "content": [part]}]}
    parsed = parse_body(_json(body), ChatCompletionRequest)
    first, second = history(parsed.messages, TemplateForms())
    assert first["weight"] == 1
    assert second["content"] == "a"
    assert parsed.unknown_fields() == []


async def test_whole_numbers_are_integers() -> None:
    body = {"prompt": "the dog", "max_tokens": 3.0, "n": 1.0, "seed": 4.0, "top_k": -1.0}
    async with http_node() as node:
        response = await node.client.post(
            "/v1/completions", json={**body, "stop_token_ids": [7.0], "priority": 2.0}
        )
        assert response.json()["usage"]["completion_tokens"] == 3
        spec = node.engine.only.request.spec
        assert (spec.sampling.seed, spec.priority, spec.sampling.stop_token_ids) == (4, 2, (7,))
        assert type(spec.sampling.max_tokens) is int


def test_a_tool_whose_type_is_null_is_a_function() -> None:
    tool = {"type": None, "function": {"name": "f"}}
    body = parse_body(_json({"messages": [USER], "tools": [tool]}), ChatCompletionRequest)
    assert [found.name for found in body.tool_use().tools] == ["f"]


@pytest.mark.parametrize("logprobs", [None, False])
def test_no_top_logprobs_ask_for_nothing(logprobs: bool | None) -> None:
    fields = {"messages": [USER], "top_logprobs": 0, "logprobs": logprobs}
    body = parse_body(_json(fields), ChatCompletionRequest)
    body.check_supported()
    assert body.wanted_logprobs is None


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
