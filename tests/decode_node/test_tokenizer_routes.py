"""Clients ask the tokenizer itself, by vLLM's paths and fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.decode_node.http_node import CONTEXT, HttpNode, http_node

USER = {"role": "user", "content": "the dog"}


async def post(node: HttpNode, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await node.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_and_back() -> None:
    async with http_node() as node:
        ids = node.tokenizer.encode("the lazy dog")
        answer = await post(node, "/tokenize", {"model": "tiny", "prompt": "the lazy dog"})
        assert answer == {
            "count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None,
        }  # fmt: skip
        strings = await post(node, "/tokenize", {"prompt": "the dog", "return_token_strs": True})
        assert "".join(strings["token_strs"]).replace("Ġ", " ") == "the dog"
        assert (await post(node, "/detokenize", {"tokens": ids}))["prompt"] == "the lazy dog"
        [special] = node.tokenizer.encode("<|user|>", add_special_tokens=False)
        assert (await post(node, "/detokenize", {"tokens": [special]}))["prompt"] == "<|user|>"
        assert not node.engine.requests


async def test_a_chat_has_the_tokens_of_its_prompt() -> None:
    tool = {"type": "function", "function": {"name": "bark", "parameters": {"type": "object"}}}
    async with http_node() as node:
        for extra in ({}, {"add_generation_prompt": False}, {"tools": [tool]}):
            body = {"messages": [USER], **extra}
            asked = await post(node, "/tokenize", body)
            assert node.tokenizer.decode(asked["tokens"]) == "u:the dog\n"
        node.engine.requests.clear()
        await post(node, "/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
        assert node.engine.only.request.spec.prompt_token_ids == asked["tokens"]


async def test_a_text_longer_than_the_context_can_be_counted() -> None:
    async with http_node() as node:
        text = "the lazy dog " * 20_000
        answer = await post(node, "/tokenize", {"prompt": text})
        assert answer["count"] == len(node.tokenizer.encode(text)) > 10 * CONTEXT
        assert (await post(node, "/detokenize", {"tokens": answer["tokens"]}))["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
    ],
)
async def test_wrong_questions(path: str, body: dict[str, Any], param: str | None) -> None:
    async with http_node() as node:
        response = await node.client.post(path, content=json.dumps(body).encode())
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


async def test_the_configuration_is_told_only_where_the_operator_allows_it() -> None:
    async with http_node() as node:
        assert (await node.client.get("/tokenizer_info")).status_code == 404
    async with http_node(enable_tokenizer_info_endpoint=True) as node:
        info = (await node.client.get("/tokenizer_info")).json()
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert "message.content" in info["chat_template"]
