"""Fields with vLLM's names that say how prompts are read and how answers are written."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from decode_node.answer.logprobs import TokenNames, chat_logprobs
from decode_node.protocol.chat.chat_answer import ChatLogprobs
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.decode_fakes import token_at
from tests.decode_node.http_node import CONTEXT, TEMPLATE, HttpNode, chunks_of, http_node
from tests.engine.frontend.small_tokenizers import byte_fallback_backend

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "the dog"}
TEXT = {"prompt": "the dog", "max_tokens": 8, "seed": 4}
CHAT = {"messages": [USER], "max_tokens": 8, "seed": 4}
URLS: dict[str, dict[str, Any]] = {COMPLETIONS: TEXT, CHATS: CHAT}
SPECIAL = "<|user|>"


async def post(node: HttpNode, url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = await node.client.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(node: HttpNode, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await node.client.post(url, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return chunks_of(response.text)


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""


def last_prompt(node: HttpNode) -> list[int]:
    return list(node.engine.requests.values())[-1].request.spec.prompt_token_ids


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    return "".join(text_of(chunk["choices"][0]) for chunk in chunks)


@pytest.mark.parametrize("url", URLS)
async def test_a_stop_string_can_be_part_of_the_answer(url: str) -> None:
    async with http_node() as node:
        whole = text_of((await post(node, url, URLS[url]))["choices"][0])
        stop = whole[3:5]
        body = {**URLS[url], "stop": [stop], "include_stop_str_in_output": True}
        choice = (await post(node, url, body))["choices"][0]
        assert text_of(choice) == whole[: whole.index(stop) + len(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        chunks = await stream(node, url, body)
        assert streamed_text(chunks) == text_of(choice)
        assert chunks[-1]["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize("url", URLS)
async def test_the_end_says_why_also_where_there_is_nothing_to_say(url: str) -> None:
    async with http_node() as node:
        assert (await post(node, url, URLS[url]))["choices"][0]["stop_reason"] is None
        *chunks, last = await stream(node, url, URLS[url])
        assert last["choices"][0]["stop_reason"] is None
        assert not any("stop_reason" in chunk["choices"][0] for chunk in chunks)


@pytest.mark.parametrize("url", URLS)
async def test_special_tokens_are_shown_to_who_asks(url: str) -> None:
    async with http_node(auto=False) as node:
        special = node.tokenizer.encode(SPECIAL, add_special_tokens=False)
        assert len(special) == 1
        for options, shown in (
            ({}, ""),
            ({"skip_special_tokens": False}, SPECIAL * 2),
            ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, SPECIAL * 2),
        ):
            node.engine.requests.clear()
            task = node.client.post(url, json={**URLS[url], **options})
            answer = _start(task)
            fake = await node.engine.added()
            output = fake.state.processor.process(special * 2, finish_reason="length")
            fake.finished = True
            fake.state.give(output)
            assert text_of((await answer).json()["choices"][0]) == shown


def _start(request: Any) -> Any:
    return asyncio.ensure_future(request)


@pytest.mark.parametrize("url", URLS)
async def test_prompts_are_cut_in_front(url: str) -> None:
    async with http_node() as node:
        long = {"prompt": "the lazy dog " * 300}
        if url == CHATS:
            long = {"messages": [{"role": "user", "content": long["prompt"]}]}
        for asked, kept in ((7, 7), (CONTEXT - 8, CONTEXT - 8), (-1, CONTEXT - 8)):
            node.engine.requests.clear()
            body = {**URLS[url], **long, "truncate_prompt_tokens": asked}
            answer = await post(node, url, body)
            assert answer["usage"]["prompt_tokens"] == kept
            ids = node.engine.only.request.spec.prompt_token_ids
            assert "dog" in node.tokenizer.decode(ids)[-8:]
        body = {**URLS[url], **long, "truncate_prompt_tokens": -1, "max_tokens": 32_000}
        usage = (await post(node, url, body))["usage"]
        assert usage["prompt_tokens"] == usage["completion_tokens"] == CONTEXT // 2
        short = await post(node, url, {**URLS[url], "truncate_prompt_tokens": 200})
        assert short["usage"] == (await post(node, url, URLS[url]))["usage"]
        for wrong in (0, -2, CONTEXT + 1):
            body = {**URLS[url], "truncate_prompt_tokens": wrong}
            refused = await node.client.post(url, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_token_ids_are_cut_in_front_too() -> None:
    async with http_node() as node:
        body = {**TEXT, "prompt": [7] * 5000 + [8, 9], "truncate_prompt_tokens": 3}
        await post(node, COMPLETIONS, body)
        assert node.engine.only.request.spec.prompt_token_ids == [7, 8, 9]


@pytest.mark.parametrize("url", URLS)
async def test_the_front_of_a_prompt_is_kept_where_it_is_asked_for(url: str) -> None:
    async with http_node() as node:
        text = "one " + "the lazy dog " * 20
        prompt = (
            {"prompt": text} if url == COMPLETIONS else {"messages": [{**USER, "content": text}]}
        )
        body = {**URLS[url], **prompt, "truncate_prompt_tokens": 6, "return_token_ids": True}
        kept = {}
        for side in ("left", "right", None):
            await post(node, url, {**body, "truncation_side": side})
            kept[side] = last_prompt(node)
        await post(node, url, {**body, "truncate_prompt_tokens": None})
        whole = last_prompt(node)
        assert kept["right"] == whole[:6] != kept["left"]
        assert kept[None] == kept["left"] == whole[-6:]
        refused = await node.client.post(url, json={**body, "truncation_side": "middle"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "truncation_side"


async def test_the_front_of_token_ids_is_kept_where_it_is_asked_for() -> None:
    async with http_node() as node:
        cut = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
        await post(node, COMPLETIONS, {**TEXT, "prompt": [8, 9] + [7] * 5000, **cut})
        assert node.engine.only.request.spec.prompt_token_ids == [8, 9, 7]


async def test_the_token_of_the_text_is_the_first_of_the_likely_ones() -> None:
    async with http_node() as node:
        body = {**TEXT, "max_tokens": 3, "logprobs": 2, "echo": True}
        found = (await post(node, COMPLETIONS, body))["choices"][0]["logprobs"]
        firsts = [next(iter(top)) for top in found["top_logprobs"][1:]]
        assert firsts == found["tokens"][1:]


async def test_a_bias_names_the_key_that_is_no_token() -> None:
    async with http_node() as node:
        refused = await node.client.post(CHATS, json={**CHAT, "logit_bias": {"5": 1, "dog": 1}})
        assert refused.status_code == 400
        assert "'dog'" in refused.json()["error"]["message"]


async def test_an_echo_shows_the_special_tokens_that_the_client_sent() -> None:
    async with http_node() as node:
        [special] = node.tokenizer.encode(SPECIAL, add_special_tokens=False)
        dog = node.tokenizer.encode("dog", add_special_tokens=False)
        body = {**TEXT, "prompt": [special, *dog], "echo": True}
        choice = (await post(node, COMPLETIONS, body))["choices"][0]
        assert choice["text"].startswith(SPECIAL + "dog")
        end = node.tokenizer.decode(node.tokenizer.encode("the lazy dog")[-2:])
        cut = {**TEXT, "prompt": "the lazy dog", "echo": True, "truncate_prompt_tokens": 2}
        assert (await post(node, COMPLETIONS, cut))["choices"][0]["text"].startswith(end)


async def test_every_choice_echoes_the_prompt() -> None:
    async with http_node() as node:
        body = {**TEXT, "n": 2, "echo": True, "logprobs": 1}
        plain = await post(node, COMPLETIONS, {**TEXT, "n": 2})
        echoed = await post(node, COMPLETIONS, body)
        for own, bare in zip(echoed["choices"], plain["choices"], strict=True):
            assert own["text"] == "the dog" + bare["text"]
            assert own["logprobs"]["token_logprobs"][0] is None


async def test_tokens_of_logprobs_by_their_ids() -> None:
    async with http_node() as node:
        wanted = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        body = {**TEXT, **wanted, "logprobs": 1}
        prompt = len(node.tokenizer.encode("the dog"))
        ids = [f"token_id:{token_at(prompt + i, 4)}" for i in range(2)]
        found = (await post(node, COMPLETIONS, body))["choices"][0]["logprobs"]
        assert found["tokens"] == ids
        assert [set(top) for top in found["top_logprobs"]] == [{i, "token_id:1"} for i in ids]
        assert found["text_offset"][0] == 0
        chat = {**CHAT, **wanted, "logprobs": True, "top_logprobs": 1}
        entries = (await post(node, CHATS, chat))["choices"][0]["logprobs"]["content"]
        assert all(entry["token"].startswith("token_id:") for entry in entries)
        assert entries[0]["top_logprobs"][0]["token"] == "token_id:1"


@pytest.mark.parametrize("url", URLS)
async def test_the_body_may_name_the_answer(url: str) -> None:
    async with http_node() as node:
        answer = await post(node, url, {**URLS[url], "request_id": "mine"})
        assert answer["id"].endswith("-mine")
        chunks = await stream(node, url, {**URLS[url], "request_id": "mine"})
        assert {chunk["id"] for chunk in chunks} == {answer["id"]}
        named = await node.client.post(url, json=URLS[url], headers={"x-request-id": "theirs"})
        assert named.json()["id"].endswith("-theirs")
        assert named.headers["x-request-id"] == "theirs"


async def test_prompt_logprobs_of_a_chat() -> None:
    async with http_node() as node:
        answer = await post(node, CHATS, {**CHAT, "prompt_logprobs": 1})
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert answer["prompt_logprobs"][0] is None


@pytest.mark.parametrize(("most", "asked", "status"), [(20, 20, 200), (3, 4, 400), (50, 50, 200)])
async def test_the_operator_bounds_log_probabilities(most: int, asked: int, status: int) -> None:
    async with http_node(max_logprobs=most) as node:
        for url, extra, param in (
            (COMPLETIONS, {"logprobs": asked}, "logprobs"),
            (COMPLETIONS, {"prompt_logprobs": asked}, "prompt_logprobs"),
            (CHATS, {"logprobs": True, "top_logprobs": asked}, "top_logprobs"),
        ):
            response = await node.client.post(url, json={**URLS[url], **extra})
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == param
                assert str(most) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "extra", "count", "param"),
    [
        (COMPLETIONS, {"logprobs": 4, "n": 2, "max_tokens": 21}, 210, "logprobs"),
        (COMPLETIONS, {"logprobs": 4, "prompt": ["a"] * 3, "max_tokens": 14}, 210, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "prompt": [5] * 105}, 210, "prompt_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": 9, "max_tokens": 21}, 210, "top_logprobs"),
    ],
)
async def test_the_size_of_an_answer_with_log_probabilities_is_bounded(
    url: str, extra: dict[str, Any], count: int, param: str
) -> None:
    async with http_node(max_answer_logprobs=count - 1) as node:
        body = {**URLS[url], **extra}
        response = await node.client.post(url, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert f"may have {count} log probabilities" in error["message"]
        assert not node.engine.requests, "nothing is computed"
        if "prompt_logprobs" not in extra:
            async with node.client.stream("POST", url, json={**body, "stream": True}) as streamed:
                assert streamed.status_code == 200
    async with http_node(max_answer_logprobs=count) as node:
        assert (await node.client.post(url, json=body)).status_code == 200


async def test_token_ids_are_where_clients_look_for_them() -> None:
    async with http_node() as node:
        wanted = {"return_token_ids": True, "n": 2}
        whole = await post(node, CHATS, {**CHAT, **wanted})
        prompt = next(iter(node.engine.requests.values())).request.spec.prompt_token_ids
        assert whole["prompt_token_ids"] == prompt
        ids = [[token_at(len(prompt) + i, seed) for i in range(8)] for seed in (4, 5)]
        assert [choice["token_ids"] for choice in whole["choices"]] == ids
        first, *others = await stream(node, CHATS, {**CHAT, **wanted})
        assert first["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in chunk for chunk in others)
        streamed: list[list[int]] = [[], []]
        for chunk in (first, *others):
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["token_ids"]
        assert streamed == ids
        first, *others = await stream(node, COMPLETIONS, {**TEXT, "return_token_ids": True})
        assert first["choices"][0]["prompt_token_ids"] == node.tokenizer.encode("the dog")
        assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in others)


async def test_log_probabilities_of_named_tokens() -> None:
    async with http_node() as node:
        body = {**TEXT, "logprobs": 0, "logprob_token_ids": [1, 2, 1], "max_tokens": 2}
        found = (await post(node, COMPLETIONS, body))["choices"][0]["logprobs"]
        assert [len(top) for top in found["top_logprobs"]] == [3, 3]
        sampling = node.engine.only.request.spec.sampling
        assert (sampling.logprobs, sampling.logprob_token_ids) == (2, (1, 2))
        chat = {**CHAT, "logprobs": True, "logprob_token_ids": [1, 2], "max_tokens": 1}
        [entry] = (await post(node, CHATS, chat))["choices"][0]["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == 3
        own = {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert own in entry["top_logprobs"]


def written(found: ChatLogprobs) -> ChatLogprobs:
    """Each place is encoded by itself: one call for millions would hold the interpreter."""
    assert all(type(one) is msgspec.Raw for one in found.content)
    return msgspec.json.decode(msgspec.json.encode(found), type=ChatLogprobs)


def test_a_token_that_is_named_and_taken_is_told_once() -> None:
    tokens = TokenNames(Tokenizer.stand_in(9), by_id=True)
    taken = TokenLogprobs([7, 5, 7], [-0.5, -2.0, -0.5], 1)
    [entry] = written(chat_logprobs(tokens, [taken], are_named=True)).content
    assert [top.token for top in entry.top_logprobs] == ["token_id:5", "token_id:7"]
    other = TokenLogprobs([8, 5, 7], [-0.1, -2.0, -0.5], 1)
    [entry] = written(chat_logprobs(tokens, [other], are_named=True)).content
    assert [top.token for top in entry.top_logprobs] == ["token_id:8", "token_id:5", "token_id:7"]
    assert entry.token == "token_id:8"


async def test_an_answer_that_goes_on_with_a_text_keeps_the_space_between() -> None:
    """Tokenizers like Llama 2's leave out the space that a text begins with."""
    tokenizer = Tokenizer(byte_fallback_backend(), ChatTemplate(TEMPLATE, {}))
    async with http_node(tokenizer=tokenizer, scripts=["the fox"]) as node:
        body = {**TEXT, "max_tokens": 20, "logprobs": 0}
        choice = (await post(node, COMPLETIONS, body))["choices"][0]
        assert choice["text"] == " the fox"
        assert choice["logprobs"]["text_offset"] == [0, 4, 5, 6, 7, 8]
        assert streamed_text(await stream(node, COMPLETIONS, body)) == " the fox"
        echoed = await post(node, COMPLETIONS, {**TEXT, "max_tokens": 20, "echo": True})
        assert echoed["choices"][0]["text"] == "the dog the fox"
        chat: dict[str, Any] = {**CHAT, "max_tokens": 20}
        assert text_of((await post(node, CHATS, chat))["choices"][0]) == "the fox"
        begun = {"role": "assistant", "content": "the dog"}
        chat |= {"messages": [USER, begun], "continue_final_message": True}
        chat |= {"add_generation_prompt": False}
        assert text_of((await post(node, CHATS, chat))["choices"][0]) == " the fox"
