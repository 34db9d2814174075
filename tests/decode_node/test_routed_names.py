"""Clients ask for names that only routers know: the router tells the node which model is meant, and
the answer bears the client's name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode_node.http_node import MODEL, http_node

HELLO = [{"role": "user", "content": "the dog"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the dog", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "the dog", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}
ASKING: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/completions/render": {"prompt": "the dog"},
    "/tokenize": {"prompt": "the dog"},
    "/detokenize": {"tokens": [5, 6]},
}


@pytest.mark.parametrize("url", [*GENERATING, *ASKING])
async def test_a_router_says_which_model_is_meant(url: str) -> None:
    body = {**GENERATING, **ASKING}[url] | {"model": "gpt-4o"}
    routed = {"x-tandem-model": MODEL}
    async with http_node() as node:
        answer = await node.client.post(url, json=body, headers=routed)
        assert answer.status_code == 200, answer.text
        if url in GENERATING:
            assert answer.json()["model"] == "gpt-4o"
            streamed = await node.client.post(url, json=body | {"stream": True}, headers=routed)
            assert '"model":"gpt-4o"' in streamed.text.replace('": "', '":"')
            assert f'"model":"{MODEL}"' not in streamed.text
        elsewhere = await node.client.post(url, json=body, headers={"x-tandem-model": "other"})
        assert elsewhere.status_code == 404
        assert (await node.client.post(url, json=body)).status_code == 404


async def test_a_name_beyond_ascii_comes_percent_encoded() -> None:
    async with http_node() as node:
        body = GENERATING["/v1/completions"] | {"model": "模型"}
        encoded = "".join(f"%{byte:02X}" for byte in MODEL.encode())
        answer = await node.client.post(
            "/v1/completions", json=body, headers={"x-tandem-model": encoded}
        )
        assert (answer.status_code, answer.json()["model"]) == (200, "模型")


async def test_clients_name_no_models_in_headers() -> None:
    async with http_node(trust_router_headers=False) as node:
        body = GENERATING["/v1/completions"] | {"model": "gpt-4o"}
        answer = await node.client.post(
            "/v1/completions", json=body, headers={"x-tandem-model": MODEL}
        )
        assert answer.status_code == 404
