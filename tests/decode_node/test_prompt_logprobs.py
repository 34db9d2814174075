"""Answers tell about the prompt: `echo` with `logprobs`, `prompt_logprobs`, `max_tokens` 0."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decode_node.answer.completion_format import CompletionFormat
from decode_node.answer.logprobs import TokenNames, echoed_logprobs
from tests.decode_node.http_node import HttpNode, chunks_of, http_node

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ECHO = {"prompt": "the dog", "echo": True, "logprobs": 2, "max_tokens": 3, "seed": 4}


async def post(node: HttpNode, url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await node.client.post(url, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def texts(node: HttpNode, token_ids: list[int]) -> list[str]:
    return [node.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in token_ids]


async def test_echo_tells_logprobs_of_the_prompt_first() -> None:
    async with http_node() as node:
        (choice,) = (await post(node, COMPLETIONS, ECHO))["choices"]
        prompt = node.tokenizer.encode("the dog")
        found = choice["logprobs"]
        assert len({len(values) for values in found.values()}) == 1
        assert found["tokens"][: len(prompt)] == texts(node, prompt)
        assert len(found["tokens"]) == len(prompt) + 3
        assert found["token_logprobs"][: len(prompt)] == [None] + [-0.5] * (len(prompt) - 1)
        assert found["top_logprobs"][0] is None
        one, second = texts(node, [1, prompt[1]])
        assert found["top_logprobs"][1] == {one: -0.25, second: -0.5}
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            if "\ufffd" not in token and token not in texts(node, [0, 1]):
                assert choice["text"].startswith(token, offset)
        assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_streamed_and_whole_echoes_are_the_same(max_tokens: int) -> None:
    async with http_node() as node:
        body = {**ECHO, "max_tokens": max_tokens}
        (whole,) = (await post(node, COMPLETIONS, body))["choices"]
        response = await node.client.post(COMPLETIONS, json={**body, "stream": True})
        chunks = [chunk["choices"][0] for chunk in chunks_of(response.text)]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        for name, values in whole["logprobs"].items():
            parts = [chunk["logprobs"][name] for chunk in chunks]
            assert [value for part in parts for value in part] == values
        assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}])
async def test_no_tokens_may_be_wanted(asked: dict[str, Any]) -> None:
    async with http_node() as node:
        body = await post(node, COMPLETIONS, {"prompt": [[5, 6, 7], [8]], "max_tokens": 0, **asked})
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["total_tokens"] == 4
        for choice, prompt in zip(body["choices"], ([5, 6, 7], [8]), strict=True):
            assert choice["finish_reason"] == "length"
            if "echo" in asked:
                assert choice["text"] == node.tokenizer.decode(prompt)
                logprobs = choice["logprobs"]["token_logprobs"]
            else:
                assert (choice["text"], choice["logprobs"]) == ("", None)
                entries = zip(choice["prompt_logprobs"], prompt, strict=True)
                logprobs = [entry and entry[str(token)]["logprob"] for entry, token in entries]
            assert logprobs == [None] + [-0.5] * (len(prompt) - 1)


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_as_the_field_has_them(url: str) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 3, "max_tokens": 2}
    body["messages" if url == CHAT else "prompt"] = (
        [{"role": "user", "content": "the dog"}] if url == CHAT else "the dog"
    )
    async with http_node() as node:
        answer = await post(node, url, body)
        prompt = node.engine.only.request.spec.prompt_token_ids
        found = answer if url == CHAT else answer["choices"][0]
        first, second, *_ = found["prompt_logprobs"]
        assert first is None and len(found["prompt_logprobs"]) == len(prompt)
        token, one, two = texts(node, [prompt[1], 1, 2])
        assert second == {
            str(prompt[1]): {"logprob": -0.5, "rank": 2, "decoded_token": token},
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": one},
            "2": {"logprob": -0.75, "rank": 3, "decoded_token": two},
        }


async def test_a_prefill_node_sends_them_with_the_first_token() -> None:
    async with http_node() as node:
        node.nodes.on_call = lambda call: (call.first_token(), call.taken())
        headers = {"x-prefiller-host-port": "a:1"}
        local = await post(node, COMPLETIONS, ECHO)
        response = await node.client.post(
            COMPLETIONS, json={**ECHO, "max_tokens": 1}, headers=headers
        )
        assert len(node.nodes.calls) == 1
        remote = response.json()["choices"][0]["logprobs"]["token_logprobs"]
        prompt = len(node.tokenizer.encode("the dog"))
        assert remote[:prompt] == local["choices"][0]["logprobs"]["token_logprobs"][:prompt]


async def test_an_answer_whose_text_cannot_be_written_generates_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> list[bytes]:
        raise ValueError("not to be written")

    monkeypatch.setattr(CompletionFormat, "events", refuse)
    async with http_node(auto=False) as node:
        body = {**ECHO, "max_tokens": 50, "stream": True}
        answer = asyncio.create_task(node.client.post(COMPLETIONS, json=body))
        fake = await node.engine.added()
        for _ in range(20):
            if not fake.finished:
                node.engine.produce(fake)
                await asyncio.sleep(0.01)
        assert fake.finished and fake.state.processor.num_output_tokens < 20
        assert (await answer).status_code == 500


def test_tokens_that_are_not_in_the_text_take_no_room() -> None:
    pieces = [b"<s>", b" the", b" d\xc3", b"\xb6g", b"</s>"]

    class Texts:
        def token_bytes(self, token_id: int) -> bytes:
            return pieces[token_id]

    prompt = list(range(5))
    found = echoed_logprobs(TokenNames(Texts()), prompt, "the d\u00f6g</s>", [])
    assert found.text_offset == [0, 0, 3, 6, 7]
    assert echoed_logprobs(TokenNames(Texts()), prompt, "the d\u00f6g", []).text_offset[-1] == 7
