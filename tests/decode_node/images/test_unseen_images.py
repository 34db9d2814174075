"""Images for a model that sees none: refused, or said, as `--unseen-images` wants."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode_node.http_node import http_node

URL = "data:image/png;base64,AAAA"
SEEN = "look"
SAID = f"{SEEN}\n[an image, which this model cannot see]"
OF_CHATS = {"type": "image_url", "image_url": {"url": URL}}
OF_RESPONSES = {"type": "input_image", "image_url": URL}
OF_MESSAGES = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
CHATS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "/tokenize", "messages", OF_CHATS),
    ("/v1/responses", "/v1/responses/input_tokens", "input", OF_RESPONSES),
    ("/v1/messages", "/v1/messages/count_tokens", "messages", OF_MESSAGES),
]


@pytest.mark.parametrize(("path", "counted", "field", "image"), CHATS)
async def test_a_text_stands_in_the_place_of_an_image(
    path: str, counted: str, field: str, image: dict[str, Any]
) -> None:
    kind = "input_text" if field == "input" else "text"
    turn = {"role": "user", "content": [{"type": kind, "text": SEEN}, image]}
    body = {field: [turn]}
    asked = body | ({"max_tokens": 4} if path == "/v1/messages" else {})
    async with http_node(unseen_images="say") as node:
        answer = await node.client.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        [request] = node.engine.requests.values()
        ids = request.request.spec.prompt_token_ids
        assert SAID in node.tokenizer.decode(ids)
        told = (await node.client.post(counted, json=body)).json()
        assert (told.get("count") or told["input_tokens"]) == len(ids)
    async with http_node() as node:
        refused = await node.client.post(path, json=asked)
        assert refused.status_code == 400
        assert "this model takes no images here" in refused.text


async def test_a_video_is_said_as_one() -> None:
    part = {"type": "video_url", "video_url": {"url": "https://a.example/a.mp4"}}
    async with http_node(unseen_images="say") as node:
        body = {"messages": [{"role": "user", "content": [part]}]}
        told = (await node.client.post("/tokenize", json=body)).json()
        text = node.tokenizer.decode(told["tokens"])
    assert "[a video, which this model cannot see]" in text


OF_TOOLS: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("/v1/chat/completions", "messages", [
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "c",
         "content": [{"type": "text", "text": SEEN}, OF_CHATS]},
    ]),
    ("/v1/responses", "input", [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c",
         "output": [{"type": "input_text", "text": SEEN}, OF_RESPONSES]},
    ]),
    ("/v1/messages", "messages", [
        {"role": "assistant",
         "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
         "content": [{"type": "text", "text": SEEN}, OF_MESSAGES]}]},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "turns"), OF_TOOLS)
async def test_a_text_stands_in_the_place_of_an_image_of_a_tool(
    path: str, field: str, turns: list[dict[str, Any]]
) -> None:
    """Agents look at screenshots so."""
    most = "max_output_tokens" if field == "input" else "max_tokens"
    body = {field: [{"role": "user", "content": "go"}, *turns], most: 4}
    async with http_node(unseen_images="say") as node:
        answer = await node.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        [request] = node.engine.requests.values()
        assert SAID in node.tokenizer.decode(request.request.spec.prompt_token_ids)
    async with http_node() as node:
        refused = await node.client.post(path, json=body)
        assert refused.status_code == 400
        assert "this model takes no images here" in refused.text
