"""Answers are ended early by their names, and keep what they have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_transfer.metadata import KVPeer
from tests.awaited import until
from tests.decode_node.http_node import HttpNode, chunks_of, http_node
from tests.engine.core.tiny_engine import NUM_BLOCKS

IDS = [5, 6, 7]
TOKENS = {"token_ids": IDS, "sampling_params": {"max_tokens": 9}, "request_id": "mine"}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
ABORTED = {"x-tandem-aborted": "1"}


def begun(node: HttpNode, path: str, body: dict[str, Any], **headers: str) -> asyncio.Task[Any]:
    return asyncio.create_task(node.client.post(path, json=body, headers=headers))


async def abort(node: HttpNode, path: str = "/abort_request", **body: Any) -> int:
    response = await node.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["aborted"])


async def test_what_was_generated_stays() -> None:
    """A router names the request, and its client the answer: once either ends it."""
    async with http_node(auto=False) as node:
        body = {"input_ids": IDS, "rid": "mine"}
        answer = begun(node, "/generate", body, **{"x-request-id": "request"})
        node.engine.produce(await node.engine.added(), 3)
        assert await abort(node, rid="other") == 0
        assert [await abort(node, rid=name) for name in ("request", "mine")] == [1, 0]
        found = (await answer).json()
        assert len(found["output_ids"]) == 3 and found["meta_info"]["completion_tokens"] == 3
        assert found["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("name", ["mine", "too"])
async def test_an_answer_has_all_names_that_its_client_gives(name: str) -> None:
    async with http_node(auto=False) as node:
        body = {"prompt": IDS, "max_tokens": 9, "request_id": "mine", "rid": "too"}
        answer = begun(node, "/v1/completions", body)
        node.engine.produce(await node.engine.added(), 3)
        assert await abort(node, rid=name) == 1
        assert (await answer).json()["choices"][0]["finish_reason"] == "abort"


async def test_several_are_named_or_all_are_meant() -> None:
    """A stream, a prompt with several choices, and several prompts: each ends as a whole."""
    async with http_node(auto=False) as node:
        stream = begun(node, "/inference/v1/generate", {**TOKENS, "stream": True})
        node.engine.produce(await node.engine.added(), 2)
        chat = begun(node, "/v1/chat/completions", {**CHAT, "n": 2, "rid": "c"})
        await node.engine.added(3)
        texts = begun(node, "/v1/completions", {"prompt": [IDS, IDS], "max_tokens": 9})
        await node.engine.added(5)
        assert await abort(node, "/abort_requests", request_ids=["mine", "chatcmpl-c"]) == 2
        chunks = chunks_of((await stream).text)
        assert sum(len(one["choices"][0]["token_ids"]) for one in chunks) == 2
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        choices = (await chat).json()["choices"]
        assert [one["finish_reason"] for one in choices] == ["abort"] * 2
        assert not texts.done()
        assert await abort(node, "/abort_requests", request_ids=[]) == 1
        choices = (await texts).json()["choices"]
        assert [one["finish_reason"] for one in choices] == ["abort"] * 2


@pytest.mark.parametrize("named", [{"rid": "mine"}, {"abort_all": True}], ids=["named", "all"])
async def test_one_that_is_still_read_ends_when_it_is(named: dict[str, Any]) -> None:
    """A later one of its name goes on."""
    raw, read, may_end = json.dumps(TOKENS).encode(), asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield raw[:9]
        read.set()
        await may_end.wait()
        yield raw[9:]

    async with http_node() as node:
        path, kind = "/inference/v1/generate", {"content-type": "application/json"}
        asked = asyncio.create_task(node.client.post(path, content=body(), headers=kind))
        await read.wait()
        assert [await abort(node, **one) for one in ({"rid": "other"}, named)] == [0, 0]
        later = await begun(node, path, TOKENS)
        may_end.set()
        found = [answer.json()["choices"][0] for answer in (await asked, later)]
        assert [one["finish_reason"] for one in found] == ["abort", "length"]
        assert len(node.engine.requests) == 1


async def test_one_that_waits_for_a_prefill_node_waits_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asyncio.Event()

    async def never(_: str) -> KVPeer:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with http_node(auto=False) as node:
        monkeypatch.setattr(node.nodes, "handshake", never)
        answer = begun(node, "/inference/v1/generate", TOKENS, **{"x-prefiller-host-port": "a:1"})
        await asked.wait()
        assert await abort(node, abort_all=True) == 1
        (choice,) = (await answer).json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "abort")
        assert not node.engine.requests


async def test_one_that_waits_for_room_waits_no_longer() -> None:
    async with http_node(auto=False) as node:
        blocker = node.proxy._credits.claim_now(NUM_BLOCKS * 8, 1)
        answer = begun(node, "/inference/v1/generate", TOKENS, **{"x-prefiller-host-port": "a:1"})
        await until(lambda: node.proxy.num_queued)
        assert await abort(node, rid="mine") == 1
        assert (await answer).json()["choices"][0]["finish_reason"] == "abort"
        assert not node.engine.requests and not node.proxy.num_queued
        blocker.release()


async def test_one_whose_prompt_is_computed_elsewhere_ends() -> None:
    async with http_node(auto=False) as node:
        answer = begun(node, "/inference/v1/generate", TOKENS, **{"x-prefiller-host-port": "a:1"})
        await node.nodes.called()
        await until(lambda: node.engine.requests)
        assert await abort(node, rid="mine") == 1
        assert (await answer).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "place", "said"),
    [
        ("/generate", {"text": ["a", "b"]}, [0, "meta_info", "finish_reason", "type"], "abort"),
        (
            "/generate",
            {"text": "a", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1},
            ["meta_info", "finish_reason", "type"],
            "abort",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 1, "max_tokens": 0}},
            ["choices", 0, "finish_reason"],
            "abort",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "echo": True, "logprobs": 1},
            ["choices", 0, "finish_reason"],
            "abort",
        ),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, ["choices", 0, "message"], None),
        ("/v1/messages", CHAT, ["stop_reason"], "max_tokens"),
        ("/v1/responses", {"input": "a", "store": False}, ["status"], "incomplete"),
    ],
    ids=range(7),
)
async def test_nothing_is_computed_of_what_a_router_calls_aborted(
    path: str, body: dict[str, Any], place: list[Any], said: str | None
) -> None:
    async with http_node() as node:
        response = await node.client.post(path, json=body, headers=ABORTED)
        found = response.json()
        assert response.status_code == 200, found
        for step in place:
            found = found[step]
        assert found == said or said is None
        stream = await node.client.post(path, json={**body, "stream": True}, headers=ABORTED)
        assert stream.status_code == 400 or '"error":{' not in stream.text
        assert not node.engine.requests


@pytest.mark.parametrize(
    "body", [{}, {"rid": 3}, {"rid": ""}, {"abort_all": "yes"}, []], ids=range(5)
)
async def test_a_call_says_which(body: Any) -> None:
    async with http_node() as node:
        response = await node.client.post("/abort_request", json=body)
        assert (response.status_code, response.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
