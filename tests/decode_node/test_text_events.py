"""Events of more text are made from one another: they are those that would be formed anew."""

from __future__ import annotations

import re
from typing import Any

import pytest

from decode_node.answer.event import TextEvent
from decode_node.answer.format import ResponseFormat
from tests.decode_node.chat_clients import thinking_tokenizer
from tests.decode_node.http_node import HttpNode, http_node

TEXT = '<think>so "be" it</think>say "ü日" \\ \x07 and\nmore, {"a": 1} \x00text\x00 the end'
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a"}),
    "two choices": ("/v1/completions", {"prompt": "a", "n": 2}),
    "echo": ("/v1/completions", {"prompt": "a", "echo": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat of two choices": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "usage at the end": (
        "/v1/chat/completions",
        {**CHAT, "stream_options": {"include_usage": True}},
    ),
    "usage always": (
        "/v1/chat/completions",
        {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "token ids": ("/v1/completions", {"prompt": "a", "return_token_ids": True}),
    "log probabilities": ("/v1/completions", {"prompt": "a", "logprobs": 1}),
}


async def answer(node: HttpNode, path: str, body: dict[str, Any]) -> str:
    asked = {**body, "stream": True, "seed": 0, "max_tokens": 200}
    headers = {"x-tandem-journal": "1", "x-request-id": "r"}
    response = await node.client.post(path, json=asked, headers=headers)
    assert response.status_code == 200
    return re.sub(r'"created":\d+|\["start",\d+|:t .*', "", response.text)


@pytest.mark.parametrize("parser", ["none", "deepseek_r1"])
async def test_events_are_the_same_as_if_each_was_formed(
    parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, tokenizer = (TEXT, TEXT[::-1]), thinking_tokenizer()
    async with http_node(tokenizer=tokenizer, scripts=scripts, reasoning_parser=parser) as node:
        made = {name: await answer(node, *asked) for name, asked in ASKED.items()}
        monkeypatch.setattr(ResponseFormat, "_has_text_events", False)
        formed = {name: await answer(node, *asked) for name, asked in ASKED.items()}
    assert made == formed
    assert ("reasoning_content" in made["chat"]) is (parser != "none")


def test_a_text_stands_wherever_the_event_has_it() -> None:
    text_event = TextEvent(lambda text: b'{"a":%b,"b":[%b]}' % ((_quoted(text),) * 2))
    assert text_event.of('"') == b'{"a":"\\"","b":["\\""]}'


def _quoted(text: str) -> bytes:
    return b'"\\u0000text\\u0000"' if text == "\0text\0" else b"wrong"
