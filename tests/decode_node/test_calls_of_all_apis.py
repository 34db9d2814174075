"""Calls with any values are the same in chats, responses and messages, whole and streamed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.chat_clients import CHAT, accumulated, as_accumulated
from tests.decode_node.http_node import HttpNode, chunks_of, http_node
from tests.decode_node.parsers.test_calls import reasoning_of, tokens_of
from tests.decode_node.parsers.test_written_calls import TOOLS
from tests.decode_node.parsers.writers import WRITERS, plain
from tests.decode_node.test_messages_api import events_of as message_events
from tests.decode_node.test_messages_api import joined as joined_message
from tests.decode_node.test_responses_api import events_of as response_events
from tests.decode_node.test_responses_api import joined as joined_items
from tests.engine.frontend.small_tokenizers import byte_level_backend

Json = dict[str, Any]
Calls = list[tuple[str, Any]]

FAMILIES = (
    *("hermes", "mistral", "kimi_k2", "openai", "qwen3_coder", "minimax_m3", "muse_glimmer"),
    *("kimi_k3", "gemma4", "pythonic"),
)
USER = {"role": "user", "content": "hello"}
FUNCTIONS = [{"name": tool.name, "parameters": tool.parameters} for tool in TOOLS]
HOSTILE = 'a "b" \\ \n\n\t{[(</x>&quot; é 日本 👩‍👩‍👧 \u2028 \x7f null ```'
WRITTEN: Calls = [
    (
        "fetch_it",
        {
            "text": HOSTILE,
            "count": 10**20,
            "ratio": 1e-7,
            "flag": False,
            "tags": ["", " ", HOSTILE],
            "node": {"label": "", "tags": [], "nodes": [{}, {"in": {"on": True, "size": -0.5}}]},
        },
    ),
    ("now", {}),
]


def tokenizer_of(family: str) -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens(list(tokens_of(family)))
    return Tokenizer(
        backend, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    )


async def chat_answers(node: HttpNode) -> list[tuple[str, Calls]]:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    body = {"messages": [USER], "tools": tools, "max_tokens": 3000}
    (whole,) = (await node.client.post(CHAT, json=body)).json()["choices"]
    response = await node.client.post(CHAT, json={**body, "stream": True})
    found = [as_accumulated(whole), *accumulated(chunks_of(response.text))]
    return [
        (one.content, [(call["name"], json.loads(call["json"])) for call in one.calls])
        for one in found
    ]


async def responses_answers(node: HttpNode) -> list[tuple[str, Calls]]:
    tools = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    body = {"input": "hello", "tools": tools, "max_output_tokens": 3000}
    whole = (await node.client.post("/v1/responses", json=body)).json()["output"]
    response = await node.client.post("/v1/responses", json={**body, "stream": True})
    found = []
    for items in (whole, joined_items(response_events(response.text))):
        said = [part["text"] for i in items if i["type"] == "message" for part in i["content"]]
        calls = [
            (item["name"], json.loads(item["arguments"]))
            for item in items
            if item["type"] == "function_call"
        ]
        found.append(("".join(said), calls))
    return found


async def messages_answers(node: HttpNode) -> list[tuple[str, Calls]]:
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    body = {"model": "tiny", "messages": [USER], "tools": tools, "max_tokens": 3000}
    whole = (await node.client.post("/v1/messages", json=body)).json()
    response = await node.client.post("/v1/messages", json={**body, "stream": True})
    found = []
    for message in (whole, joined_message(message_events(response.text))):
        blocks = message["content"]
        said = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        found.append((said, calls))
    return found


def quoting(family: str) -> Calls:
    """Returns calls whose values quote the family's tokens."""
    draw = random.Random(family)
    words = [*tokens_of(family), "</x>", '"', "\n", " and "]
    text = "".join(draw.choice(words) for _ in range(8))
    return [("fetch_it", {"text": text, "tags": [text]}), ("now", {})]


@pytest.mark.parametrize("family", FAMILIES)
async def test_all_apis_tell_the_same_calls(family: str) -> None:
    settings = {"tool_call_parser": family, "reasoning_parser": reasoning_of(family)}
    tokenizer = tokenizer_of(family)
    async with http_node(tokenizer=tokenizer, context=4096, **settings) as node:
        for written in (WRITTEN, quoting(family)):
            text = plain(WRITERS[family](written))
            node.engine.scripts = [tokenizer.encode(text + "</s>")]
            first, *others = [
                *await chat_answers(node),
                *await responses_answers(node),
                *await messages_answers(node),
            ]
            assert others == [first] * 5
            if written is WRITTEN:
                assert first == ("", WRITTEN)
