"""Answers of the OpenAI API: bodies, streams, usage, logprobs, timeline, several choices."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from decode_node.http import routes
from decode_node.observe.timeline import PrefillRecord, RequestRecord
from decode_node.served_text import system_fingerprint
from edge.http.event_loop import long_work
from engine.frontend import input_processor
from tests.decode_node.decode_fakes import token_at
from tests.decode_node.http_node import CONTEXT, MODEL, HttpNode, chunks_of, http_node
from tests.engine.core.tiny_engine import tiny_config

CHAT = {"messages": [{"role": "user", "content": "the dog"}], "max_tokens": 8, "seed": 4}
TEXT = {"prompt": "the dog", "max_tokens": 8, "seed": 4}
URLS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


async def post(node: HttpNode, url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = await node.client.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(node: HttpNode, url: str, body: dict[str, Any], **headers: str) -> list[dict]:
    response = await node.client.post(url, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.text)


def answer_text(node: HttpNode, num_prompt_tokens: int, seed: int, count: int = 8) -> str:
    return node.tokenizer.decode([token_at(num_prompt_tokens + i, seed) for i in range(count)])


def chunk_text(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


async def test_a_completion() -> None:
    async with http_node() as node:
        body = await post(node, "/v1/completions", {**TEXT, "model": MODEL})
        prompt = len(node.tokenizer.encode("the dog"))
        assert body["object"] == "text_completion" and body["model"] == MODEL
        (choice,) = body["choices"]
        assert choice["text"] == answer_text(node, prompt, 4)
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 8,
            "total_tokens": prompt + 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert "timeline" not in body


async def test_the_event_loop_touches_no_prompt_of_a_long_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens of others pass through the loop meanwhile."""
    threads = list[str]()

    def in_thread(name: str, work: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            threads.append(f"{name} {threading.current_thread().name}")
            return work(*args, **kwargs)

        return noted

    for module, name in ((routes, "parse_body"), (input_processor, "wrong_token")):
        monkeypatch.setattr(module, name, in_thread(name, getattr(module, name)))
    padding = {"metadata": {"a": "x" * (1 + long_work.LONG_BODY)}}
    async with http_node() as node:
        for url, body in URLS.items():
            await post(node, url, body | padding)
        assert {thread.split("_")[0] for thread in threads} == {"parse", "wrong"}
        assert all("long-bodies" in thread for thread in threads)
        threads.clear()
        await post(node, "/v1/completions", TEXT)
        assert threads and not any("long-bodies" in thread for thread in threads)


async def test_a_chat_completion_uses_the_template() -> None:
    async with http_node() as node:
        body = await post(node, "/v1/chat/completions", CHAT)
        request = node.engine.only.request
        assert node.tokenizer.decode(request.spec.prompt_token_ids) == "u:the dog\n"
        (choice,) = body["choices"]
        assert choice["message"]["role"] == "assistant"
        prompt = len(request.spec.prompt_token_ids)
        assert choice["message"]["content"] == answer_text(node, prompt, 4)
        assert body["object"] == "chat.completion"


@pytest.mark.parametrize("url", URLS)
async def test_streamed_and_whole_answers_are_the_same(url: str) -> None:
    async with http_node() as node:
        whole = await post(node, url, {**URLS[url], "stop": ["zzz"]})
        chunks = await stream(node, url, {**URLS[url], "stop": ["zzz"]})
        choice = whole["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert "".join(map(chunk_text, chunks)) == text
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert not any("usage" in chunk for chunk in chunks)
        if "messages" in URLS[url]:
            assert [c["choices"][0]["delta"].get("role") for c in chunks][:2] == ["assistant", None]


@pytest.mark.parametrize("url", URLS)
async def test_whole_answers_and_chunks_name_what_computed_them(url: str) -> None:
    async with http_node() as node, http_node() as same:
        name = (await post(node, url, URLS[url]))["system_fingerprint"]
        assert re.fullmatch(r"tandem-\S+-[0-9a-f]{8}", name)
        options = {"stream_options": {"include_usage": True}, "seed": 5}
        chunks = await stream(same, url, {**URLS[url], **options})
        assert len(chunks) > 3
        assert {chunk["system_fingerprint"] for chunk in chunks} == {name}


def test_other_weights_and_types_have_other_names() -> None:
    model = tiny_config().model
    models = [
        model, replace(model, model_hash="other"), replace(model, dtype="bfloat16"),
        replace(model, path="elsewhere", served_model_name="renamed"),
    ]  # fmt: skip
    first, weights, kind, place = map(system_fingerprint, models)
    assert len({first, weights, kind}) == 3 and place == first


@pytest.mark.parametrize("url", URLS)
async def test_usage_comes_in_a_chunk_of_its_own(url: str) -> None:
    async with http_node() as node:
        body = {**URLS[url], "stream_options": {"include_usage": True}}
        *chunks, last = await stream(node, url, body)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == (await post(node, url, URLS[url]))["usage"]


@pytest.mark.parametrize("url", URLS)
async def test_usage_in_each_chunk_counts_what_its_choice_has_so_far(url: str) -> None:
    async with http_node() as node:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**URLS[url], "n": 2, "return_token_ids": True, "stream_options": options}
        *chunks, last = await stream(node, url, body)
        given = [0, 0]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            given[choice["index"]] += len(choice["token_ids"])
            usage, completion = chunk["usage"], given[choice["index"]]
            assert usage["completion_tokens"] == completion
            assert usage["total_tokens"] == usage["prompt_tokens"] + completion
        assert given == [8, 8]
        assert last["usage"]["completion_tokens"] == 16
        lone = {**URLS[url], "stream_options": {"continuous_usage_stats": True}}
        assert not any("usage" in chunk for chunk in await stream(node, url, lone))


async def test_token_ids_and_lists_of_prompts() -> None:
    async with http_node() as node:
        one = await post(node, "/v1/completions", {**TEXT, "prompt": [5, 6, 7]})
        assert one["choices"][0]["text"] == answer_text(node, 3, 4)
        many = await post(node, "/v1/completions", {**TEXT, "prompt": [[5, 6, 7], [8, 9]], "n": 2})
        assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in many["choices"]]
        assert texts == [answer_text(node, n, seed) for n in (3, 2) for seed in (4, 5)]
        assert many["usage"]["prompt_tokens"] == 5
        assert many["usage"]["completion_tokens"] == 32
        texts = await post(node, "/v1/completions", {**TEXT, "prompt": ["the", "dog"]})
        assert len(texts["choices"]) == 2


async def test_several_choices_stream_side_by_side() -> None:
    async with http_node() as node:
        body = {**CHAT, "n": 3, "stream_options": {"include_usage": True}}
        *chunks, usage = await stream(node, "/v1/chat/completions", body)
        prompt = usage["usage"]["prompt_tokens"]
        for index in range(3):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(map(chunk_text, own)) == answer_text(node, prompt, 4 + index)
            assert [c["choices"][0]["finish_reason"] for c in own][-1] == "length"
        assert usage["usage"]["completion_tokens"] == 24


async def test_max_tokens_defaults_to_what_is_left() -> None:
    async with http_node() as node:
        for url, body in URLS.items():
            answer = await post(node, url, {k: v for k, v in body.items() if k != "max_tokens"})
            assert answer["usage"]["total_tokens"] == CONTEXT
        answer = await post(node, "/v1/chat/completions", {**CHAT, "max_completion_tokens": 3})
        assert answer["usage"]["completion_tokens"] == 3


async def test_echo_repeats_the_prompt() -> None:
    async with http_node() as node:
        body = await post(node, "/v1/completions", {**TEXT, "echo": True})
        assert body["choices"][0]["text"].startswith("the dog")
        chunks = await stream(node, "/v1/completions", {**TEXT, "echo": True})
        assert "".join(map(chunk_text, chunks)) == body["choices"][0]["text"]


async def test_stop_strings_end_the_text_before_them() -> None:
    async with http_node() as node:
        whole = (await post(node, "/v1/completions", TEXT))["choices"][0]["text"]
        stop = whole[3:5]
        for body in ({**TEXT, "stop": stop}, {**TEXT, "stop": [stop, "zzz"]}):
            choice = (await post(node, "/v1/completions", body))["choices"][0]
            assert choice["text"] == whole[: whole.index(stop)]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            chunks = await stream(node, "/v1/completions", body)
            assert "".join(map(chunk_text, chunks)) == choice["text"]


async def test_logprobs_of_completions() -> None:
    async with http_node() as node:
        body = await post(node, "/v1/completions", {**TEXT, "logprobs": 2, "max_tokens": 3})
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-0.25] * 3
        assert logprobs["text_offset"][0] == 0
        assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3, 3]
        assert logprobs["tokens"][0] in logprobs["top_logprobs"][0]
        chunks = await stream(node, "/v1/completions", {**TEXT, "logprobs": 2, "max_tokens": 3})
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [part["tokens"][0] for part in parts] == logprobs["tokens"]


async def test_logprobs_of_chats() -> None:
    async with http_node() as node:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
        answer = await post(node, "/v1/chat/completions", body)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 3
        assert content[0]["logprob"] == -0.25
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
        whole = b"".join(bytes(entry["bytes"]) for entry in content)
        assert whole.decode("utf-8", "replace") == answer["choices"][0]["message"]["content"]
        plain = await post(node, "/v1/chat/completions", {**body, "top_logprobs": 0})
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_on_request() -> None:
    async with http_node() as node:
        body = {**TEXT, "prompt": [5, 6, 7], "return_token_ids": True}
        choice = (await post(node, "/v1/completions", body))["choices"][0]
        assert choice["prompt_token_ids"] == [5, 6, 7]
        assert choice["token_ids"] == [token_at(3 + i, 4) for i in range(8)]
        chunks = await stream(node, "/v1/completions", body)
        streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert streamed == choice["token_ids"]


@pytest.mark.parametrize("url", URLS)
async def test_outputs_of_several_tokens_stream_like_single_ones(url: str) -> None:
    """Text, log probabilities and their offsets, ids, usage and end; in fewer chunks."""
    wanted = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    wanted |= {"logprobs": 2} if "prompt" in URLS[url] else {"logprobs": True, "top_logprobs": 2}
    body = {**URLS[url], **wanted, "max_tokens": 14}
    answers, num_chunks = [], []
    for tokens_per_output in (1, 4):
        async with http_node() as node:
            node.engine.tokens_per_output = tokens_per_output
            chunks = await stream(node, url, body)
            answers.append(joined(chunks))
            num_chunks.append(len(chunks))
    assert answers[0] == answers[1]
    assert len(answers[0]["token_ids"]) == len(answers[0]["logprobs"]) == 14
    assert num_chunks[1] < num_chunks[0] - 8


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a client makes of a stream of one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    logprobs = [found for choice in choices if (found := choice.get("logprobs"))]
    if logprobs and "content" in logprobs[0]:
        entries = [entry for found in logprobs for entry in found["content"]]
    else:
        entries = [list(entry) for found in logprobs for entry in zip(*found.values(), strict=True)]
    return {
        "text": "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for choice in choices
        ),
        "logprobs": entries,
        "token_ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    }


async def test_sampling_parameters_reach_the_engine() -> None:
    sent = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "stop_token_ids": [399],
        "allowed_token_ids": [7, 5],
        "ignore_eos": True,
        "no_repeat_ngram_size": 3,
    }
    async with http_node() as node:
        body = {**TEXT, **sent, "logit_bias": {"5": -1.5}, "priority": -3, "cache_salt": "tenant"}
        await post(node, "/v1/completions", {**body, "bad_words": ["the", "dog"]})
        spec = node.engine.only.request.spec
        for name, value in sent.items():
            expected = tuple(value) if isinstance(value, list) else value
            assert getattr(spec.sampling, name) == expected, name
        assert spec.sampling.logit_bias == {5: -1.5}
        spelt = [node.tokenizer.decode(word) for word in spec.sampling.bad_words]
        assert [text for text in spelt if not text.startswith(" ")] == ["the", "dog"]
        assert (spec.priority, spec.cache_salt, spec.sampling.seed) == (-3, "tenant", 4)


async def test_repetitions_are_forbidden_as_mineru_asks_for_it() -> None:
    """Its clients send it with each page, for a processor of logits of their own."""
    async with http_node() as node:
        for sent, expected in (
            ({"no_repeat_ngram_size": 100, "debug": False}, 100),
            ({"no_repeat_ngram_size": 35, "debug": True, "other": None}, 35),
            ({}, 0),
            (None, 0),
        ):
            await post(node, "/v1/chat/completions", {**CHAT, "vllm_xargs": sent})
            assert node.engine.only.request.spec.sampling.no_repeat_ngram_size == expected
            node.engine.forget_ended()
        both = {"no_repeat_ngram_size": 4, "vllm_xargs": {"no_repeat_ngram_size": 100}}
        await post(node, "/v1/completions", {**TEXT, **both})
        assert node.engine.only.request.spec.sampling.no_repeat_ngram_size == 4
        node.engine.forget_ended()
        for name, value in (("window_size", 90), ("no_repeat_ngram_size", "9"), ("x", [1])):
            body = {**CHAT, "vllm_xargs": {name: value}}
            refused = await node.client.post("/v1/chat/completions", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, f"vllm_xargs.{name}")
            assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "the dog"}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 8, "model": MODEL}),
    ],
)
async def test_the_smallest_nucleus_is_the_most_likely_token(url: str, body: Any) -> None:
    """OpenAI's range of top_p begins with 0."""
    async with http_node() as node:
        await post(node, url, {**body, "top_p": 0, "top_k": 9, "temperature": 1})
        sampling = node.engine.only.request.spec.sampling
        assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, 1.0)


async def test_fields_that_change_nothing_are_taken() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    harmless = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    message = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": []}
    async with http_node() as node:
        messages = [*CHAT["messages"], message, {"role": "user", "content": "b", "name": "x"}]
        body = {**CHAT, **ignored, **harmless, "messages": messages, "prompt_cache_key": "k"}
        await post(node, "/v1/chat/completions", body)
        await post(node, "/v1/completions", {**TEXT, **ignored, "best_of": 1, "suffix": None})


@pytest.mark.parametrize("sampling", [{"n": 2, "temperature": 1}, {"n": 1, "temperature": 0}])
@pytest.mark.parametrize(
    ("url", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
)
async def test_a_best_of_that_chooses_nothing_is_taken(
    url: str, body: dict[str, Any], sampling: dict[str, int]
) -> None:
    """As many as are answered, or more that are all alike."""
    async with http_node() as node:
        best_of = 2 if sampling["n"] == 2 else 5
        answer = await post(node, url, {**body, **sampling, "best_of": best_of})
        assert len(answer["choices"]) == sampling["n"]


async def test_text_parts_become_one_text() -> None:
    """A refusal in an assistant's turn is text as well, as the API's types have it."""
    parts = [{"type": "text", "text": "the"}, {"type": "refusal", "refusal": "dog"}]
    async with http_node() as node:
        body = {**CHAT, "messages": [{"role": "user", "content": parts}]}
        await post(node, "/v1/chat/completions", body)
        prompt = node.tokenizer.decode(node.engine.only.request.spec.prompt_token_ids)
        assert prompt == "u:the\ndog\n"


# What tandem adds -------------------------------------------------------------------------------


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("url", URLS)
async def test_the_timeline_rides_on_the_last_chunk(url: str, include_usage: bool) -> None:
    async with http_node() as node:
        body = {**URLS[url], "stream_options": {"include_usage": include_usage}}
        *chunks, last = await stream(node, url, body, **{"x-tandem-timeline": "1"})
        assert not any("timeline" in chunk for chunk in chunks)
        timeline = last["timeline"]
        assert timeline["path"] == "local" and timeline["prefill_node"] is None
        whole = await post(node, url, URLS[url], **{"x-tandem-timeline": "1"})
        assert whole["timeline"].keys() == timeline.keys()
        assert set(timeline) == {
            *("admitted_s", "queue_s", "prefill_s", "first_token_s", "second_token_s", "total_s"),
            *("kv_first_byte_s", "kv_last_byte_s", "kv_bytes", "kv_streams", "cached_tokens"),
            *("prefill_node", "path", "attempts"),
        }


@pytest.mark.parametrize("url", URLS)
async def test_a_remote_prefill_shows_in_headers_usage_and_timeline(url: str) -> None:
    async with http_node() as node:
        node.nodes.on_call = lambda call: (call.first_token(), call.taken())
        node.engine.on_generate = lambda fake: node.engine.kv_arrives(fake)
        headers = {"x-prefiller-host-port": "a:1, b:2", "x-tandem-timeline": "1"}
        response = await node.client.post(url, json=URLS[url], headers=headers)
        assert response.headers["x-tandem-prefill-node"] == "a:1"
        work = response.headers["x-tandem-prefill-work"]
        assert re.fullmatch(r"prompt=\d+;cached=3;queue=[\d.]+;compute=[\d.]+", work)
        body = response.json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 8
        timeline = body["timeline"]
        assert (timeline["path"], timeline["prefill_node"]) == ("remote", "a:1")
        assert (timeline["attempts"], timeline["cached_tokens"]) == (1, 3)
        local = await node.client.post(url, json=URLS[url])
        assert local.headers["x-tandem-prefill-node"] == "local"
        assert local.json()["choices"] == body["choices"]


async def test_the_header_can_be_switched_off() -> None:
    async with http_node(trust_router_headers=False) as node:
        await post(node, "/v1/completions", TEXT, **{"x-prefiller-host-port": "evil:1"})
        assert not node.nodes.handshakes


async def test_request_ids_are_kept_or_made() -> None:
    async with http_node() as node:
        response = await node.client.post(
            "/v1/completions", json=TEXT, headers={"x-request-id": "my-id_1.2"}
        )
        assert response.headers["x-request-id"] == "my-id_1.2"
        assert response.json()["id"] == "cmpl-my-id_1.2"
        for bad in ("x" * 65, "two words", "ünïcode"):
            response = await node.client.get(
                "/v1/models", headers={"x-request-id": bad.encode("latin-1")}
            )
            assert response.headers["x-request-id"] != bad
            assert len(response.headers["x-request-id"]) == 32


async def test_equal_request_ids_at_the_same_time_do_not_clash() -> None:
    async with http_node() as node:
        for _ in range(2):
            await post(node, "/v1/completions", TEXT, **{"x-request-id": "same"})
        assert len(node.engine.requests) == 2


async def test_models() -> None:
    async with http_node() as node:
        models = (await node.client.get("/v1/models")).json()
        assert models["object"] == "list"
        (model,) = models["data"]
        assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT)
        assert (await node.client.get(f"/v1/models/{MODEL}")).json() == model
        assert (await node.client.get("/v1/models/other")).status_code == 404
        slashed = await node.client.get("/v1/models/?limit=2")
        assert (slashed.status_code, slashed.headers["location"]) == (307, "../models?limit=2")


async def test_metrics_count_what_happened() -> None:
    async with http_node() as node:
        await post(node, "/v1/completions", {**TEXT, "n": 2})
        node.nodes.unreachable = {"a:1"}
        await post(node, "/v1/completions", TEXT, **{"x-prefiller-host-port": "a:1"})
        node.nodes.unreachable = set()
        node.nodes.on_call = lambda call: call.fail("resource_exhausted")
        await post(node, "/v1/completions", TEXT, **{"x-prefiller-host-port": "a:1"})
        node.nodes.on_call = lambda call: call.first_token()
        one = {**TEXT, "max_tokens": 1}
        await post(node, "/v1/completions", one, **{"x-prefiller-host-port": "a:1"})
        metrics = await node.metrics()

        def value(name: str, **labels: str) -> float:
            return metrics[name + (json.dumps(labels) if labels else "")]

        assert value("vllm:request_success_total", finished_reason="length") == 5
        assert value("vllm:time_to_first_token_seconds_count") == 5
        assert value("vllm:inter_token_latency_seconds_count") == 28
        assert value("vllm:request_generation_tokens_sum") == 33
        assert value("vllm:request_params_n_sum") == 5
        assert value("tandem_disagg_decision_total", decision_type="decode-only") == 2
        assert value("tandem_disagg_decision_total", decision_type="prefill-decode") == 1
        assert value("tandem_disagg_decision_total", decision_type="prefill-only") == 1
        assert value("tandem_prefill_attempt_failures_total", reason="unreachable") == 1
        assert value("tandem_prefill_attempt_failures_total", reason="resource_exhausted") == 1
        assert value("tandem_local_prefill_fallbacks_total") == 1
        assert value("tandem_open_requests") == 0
        assert value("tandem_credit_blocks_free") == value("tandem_kv_blocks")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert value(f"vllm:{name}") == 0
        assert value("vllm:cache_config_info", block_size="8", num_gpu_blocks="96") == 1


async def test_the_prefill_node_learns_what_routers_call_the_prompt() -> None:
    async with http_node() as node:
        node.nodes.on_call = lambda call: (call.first_token(), call.taken())
        node.engine.on_generate = lambda fake: node.engine.kv_arrives(fake)
        for given, known in (("00000000000000ff", 255), ("no hash", 0)):
            headers = {"x-prefiller-host-port": "a:1", "x-tandem-prefix": given}
            await node.client.post("/v1/completions", json=TEXT, headers=headers)
            assert node.nodes.calls[-1].request.spec.prefix_hash == known


async def test_what_a_node_says_of_itself() -> None:
    async with http_node(root_path="/llm", api_keys="key") as node:
        for path in ("/version", "/load", "/openapi.json", "/docs", "/llm/docs"):
            assert (await node.client.get(path)).status_code == 401, path
        node.client.headers["x-api-key"] = "key"
        version = (await node.client.get("/version")).json()
        assert version == {"version": importlib.metadata.version("tandem")}
        assert (await node.client.get("/load")).json() == {"server_load": 0}
        described = (await node.client.get("/llm/openapi.json")).json()
        assert "/v1/chat/completions" in described["paths"]
        assert described["servers"] == [{"url": "/llm"}]
        page = await node.client.get("/docs")
        assert "POST /v1/chat/completions" in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")


async def test_load_counts_what_is_being_answered() -> None:
    async with http_node(auto=False) as node:
        asked = asyncio.create_task(node.client.post("/v1/completions", json=TEXT))
        async with asyncio.timeout(30):
            while (await node.client.get("/load")).json() != {"server_load": 1}:
                await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        async with asyncio.timeout(30):
            while (await node.client.get("/load")).json() != {"server_load": 0}:
                await asyncio.sleep(0.01)


async def test_a_ping_is_answered_as_the_health_is() -> None:
    async with http_node() as node:
        for unhealthy, status in (("", 200), ("the engine is dead", 503)):
            node.state.unhealthy = unhealthy
            for answer in (
                await node.client.get("/ping"),
                await node.client.post("/ping"),
                await node.client.get("/health"),
            ):
                assert answer.status_code == status


@pytest.mark.parametrize("url", URLS)
async def test_metrics_are_told_of_a_single_answer_at_its_end(url: str) -> None:
    names = {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
        "tokens_per_second",
    }  # fmt: skip
    async with http_node() as node:
        body = {**URLS[url], "max_tokens": 5, "include_metrics": True}
        whole = await post(node, url, body)
        assert set(whole["metrics"]) == names
        times = whole["metrics"]
        assert times["time_to_first_token_ms"] >= 0 and times["queue_time_ms"] >= 0
        assert times["generation_time_ms"] == pytest.approx(4 * times["mean_itl_ms"])
        for options in (None, {"include_usage": True}):
            *chunks, last = await stream(node, url, {**body, "stream_options": options})
            assert set(last["metrics"]) == names
            assert not any("metrics" in chunk for chunk in chunks)
        assert "metrics" not in await post(node, url, {**body, "n": 2})
        assert "metrics" not in await post(node, url, {**body, "include_metrics": None})


@pytest.mark.parametrize("is_remote", [False, True])
def test_times_of_an_answer_are_cut_where_vllm_cuts_them(is_remote: bool) -> None:
    """The wait is in `queue_time_ms` alone, and the prompt in none of the time of generation."""
    record = RequestRecord(num_prompt_tokens=3, received_at=10.0, local_queue_s=0.5)
    if is_remote:
        record.local_queue_s = 0.0
        record.prefill = PrefillRecord(admitted_at=10.1, remote_queue_s=0.4)
    record.first_token_at, record.last_token_at, record.num_output_tokens = 11.0, 12.5, 4
    times = msgspec.structs.asdict(record.metrics())
    assert times == pytest.approx(
        {
            "queue_time_ms": 500.0,
            "time_to_first_token_ms": 500.0,
            "generation_time_ms": 1500.0,
            "mean_itl_ms": 500.0,
            "tokens_per_second": 2.0,
        }
    )


@pytest.mark.parametrize("url", URLS)
async def test_an_operator_may_have_all_streams_tell_usage(url: str) -> None:
    async with http_node(enable_force_include_usage=True) as node:
        for options in (None, {"include_usage": False}):
            *chunks, last = await stream(node, url, {**URLS[url], "stream_options": options})
            assert last["usage"]["total_tokens"] > 0 and last["choices"] == []
            assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("url", URLS)
async def test_the_load_is_told_in_the_format_that_a_gateway_asks_for(url: str) -> None:
    async with http_node() as node:
        for form, expected in (
            ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.0, "
             "named_metrics.num_requests_waiting=0"),
            ("json", 'JSON {"named_metrics":{"kv_cache_usage_perc":0.0,'
             '"num_requests_waiting":0}}'),
            ("BIN", None),
        ):  # fmt: skip
            headers = {"endpoint-load-metrics-format": form}
            answer = await node.client.post(url, json=URLS[url], headers=headers)
            assert answer.headers.get("endpoint-load-metrics") == expected
        assert "endpoint-load-metrics" not in (await node.client.post(url, json=URLS[url])).headers
