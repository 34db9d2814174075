"""Stop strings over all APIs: headers of gpt-oss and of calls hold none."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.chat_clients import CHAT, MESSAGES, SCRIPT, TOOLS, thinking_tokenizer
from tests.decode_node.http_node import HttpNode, http_node, sse_events
from tests.engine.frontend.small_tokenizers import byte_level_backend

MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
TEMPLATE = "<|start|>{{ messages[0].content }}<|channel|><|message|>"
ANSWER = (
    "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>final<|message|>"
    "Yes, it is final.<|return|>"
)
FUNCTION = TOOLS[0]["function"]
APIS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "tools": TOOLS}),
    ("/v1/responses", {"input": "hello", "tools": [{"type": "function", **FUNCTION}]}),
    (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 500,
            "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
        },
    ),
]
SEEN = {
    CHAT: lambda body: [body["choices"][0]["message"]["content"]],
    "/v1/responses": lambda body: [
        part["text"]
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
    ],
    "/v1/messages": lambda body: [b["text"] for b in body["content"] if b["type"] == "text"],
}


@cache
def harmony_tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens(MARKERS)
    return Tokenizer(backend, ChatTemplate(TEMPLATE, {}))


async def content_of(node: HttpNode, path: str, body: dict[str, Any], *stop: str) -> list[str]:
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    answer = await node.client.post(path, json={**body, name: stop})
    assert answer.status_code == 200, answer.text
    found: list[str] = SEEN[path](answer.json())
    return found


@pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])
async def test_stop_strings_do_not_match_headers(path: str, body: dict[str, Any]) -> None:
    async with http_node(tokenizer=harmony_tokenizer(), scripts=[ANSWER] * 2, context=1200) as node:
        hidden = ("assistant", "analysis", "channel", "message", "final<")
        assert await content_of(node, path, body, *hidden) == ["Yes, it is final."]
        assert await content_of(node, path, body, "final") == ["Yes, it is "]


async def test_a_stop_string_leaves_calls_whose_header_holds_it() -> None:
    async with http_node(tokenizer=thinking_tokenizer(), scripts=[SCRIPT], context=1200) as node:
        body = {"messages": MESSAGES, "tools": TOOLS, "stop": ["name", "weather", "arguments"]}
        choice = (await node.client.post(CHAT, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("counts", [True, False])
async def test_reasoning_may_be_left_out(counts: bool) -> None:
    async with http_node(
        tokenizer=harmony_tokenizer(), scripts=[ANSWER] * 2, context=1200, stop_in_reasoning=counts
    ) as node:
        body = {"messages": MESSAGES, "stop": ["th", "it"]}
        whole = (await node.client.post(CHAT, json=body)).json()["choices"][0]
        answer = await node.client.post(CHAT, json={**body, "stream": True})
    message = whole["message"]
    expected = ("I ", None) if counts else ("I think", "Yes, ")
    assert (message["reasoning_content"], message["content"]) == expected
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "th" if counts else "it")
    told = "".join(sse_events(answer.text))
    assert told.count('"finish_reason":"stop"') == 1
