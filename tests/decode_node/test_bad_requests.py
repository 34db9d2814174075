"""Everything wrong gets a typed error of the API, and hurts nothing else in flight."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decode_node.answer.answer
import decode_node.answer.format
import decode_node.http.routes
from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from edge.http.errors import HttpError
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.decode_fakes import until
from tests.decode_node.http_node import CONTEXT, VOCAB_SIZE, chunks_of, http_node, sse_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and len(error["message"]) > 8
    assert error["type"] and error["code"]
    if param is not None:
        assert error["param"] == param, error
    return error


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {"role": "assistant", "content": None}


def tool(name: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BEAMS = {"prompt": [1], "use_beam_search": True, "best_of": 4}
BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [-1], "echo": True}, "prompt"),
    ({"prompt": [[1], [1, 2**32]], "echo": True}, "prompt"),
    ({"prompt": [1] * CONTEXT}, "prompt"),
    ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
    ({"prompt": [1], "max_tokens": -5}, "max_tokens"),
    ({"prompt": [1], "max_tokens": 10**40}, "max_tokens"),
    ({"prompt": [1], "max_tokens": "5"}, "max_tokens"),
    ({"prompt": [1], "max_tokens": 5.5}, "max_tokens"),
    ({"prompt": [1], "max_tokens": True}, "max_tokens"),
    ({"prompt": [1], "temperature": -1}, "temperature"),
    ({"prompt": [1], "temperature": "hot"}, "temperature"),
    ({"prompt": [1], "temperature": 10**400}, "temperature"),
    ({"prompt": [1], "top_p": -0.01}, "top_p"),
    ({"prompt": [1], "top_p": 1.01}, "top_p"),
    ({"prompt": [1], "top_k": -2}, "top_k"),
    ({"prompt": [1], "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": [1], "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": [1], "n": 0}, "n"),
    ({"prompt": [1], "n": -1}, "n"),
    ({"prompt": [1], "n": 10**6}, "n"),
    ({"prompt": [1], "n": 2**64}, "n"),
    ({"prompt": [[1], [2]], "n": 33}, "n"),
    ({"prompt": [[1]] * 65}, "prompt"),
    ({"prompt": [1], "best_of": 2}, "best_of"),
    ({"prompt": [1], "best_of": 2, "n": 3, "temperature": 0}, "best_of"),
    ({"prompt": [1], "suffix": "x"}, "suffix"),
    ({"prompt": [1], "echo": True, "logprobs": 21}, "logprobs"),
    ({"prompt": [1], "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": [1], "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": [1], "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": [1], "max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"prompt": [1], "logprobs": 21}, "logprobs"),
    ({"prompt": [1], "logprobs": True}, "logprobs"),
    ({"prompt": [1], "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"prompt": [1], "logprobs": 0, "logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
    ({"prompt": [1], "logprobs": 0, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ({"prompt": [1], "stop": ""}, "stop"),
    ({"prompt": [1], "stop": ["x"] * 65}, "stop"),
    ({"prompt": [1], "stop": [1]}, "stop.0"),
    ({"prompt": [1], "stop": {}}, "stop"),
    ({"prompt": [1], "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"prompt": [1], "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": [1], "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"prompt": [1], "logit_bias": {"1": 1000}}, "logit_bias"),
    ({"prompt": [1], "logit_bias": [1]}, "logit_bias"),
    ({"prompt": [1], "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": [1], "allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
    ({"prompt": [1], "allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"prompt": [1], "allowed_token_ids": [1.5]}, "allowed_token_ids.0"),
    ({"prompt": [1], "allowed_token_ids": 1}, "allowed_token_ids"),
    ({"prompt": [1], "allowed_token_ids": [1] * 5000}, "allowed_token_ids"),
    ({"prompt": [1], "bad_words": [""]}, "bad_words"),
    ({"prompt": [1], "bad_words": "x"}, "bad_words"),
    ({"prompt": [1], "bad_words": [1]}, "bad_words.0"),
    ({"prompt": [1], "bad_words": ["x" * 257]}, "bad_words"),
    ({"prompt": [1], "bad_words": ["x"] * 257}, "bad_words"),
    ({"prompt": [1], "bad_words": ["qzxj" * 20]}, "bad_words"),
    ({"prompt": [1], "seed": "x"}, "seed"),
    ({"prompt": [1], "stream": "yes"}, "stream"),
    ({"prompt": [1], "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": [1], "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"prompt": [1], "priority": 1 << 40}, "priority"),
    ({"prompt": [1], "cache_salt": "x" * 513}, "cache_salt"),
    ({"prompt": [1], "model": 5}, "model"),
    ({"prompt": [1], "messages": [USER]}, "messages"),
    ({"prompt": [1], "max_tokens": 5.000001}, "max_tokens"),
    ({"prompt": [1], "stop_token_ids": [1.5]}, "stop_token_ids.0"),
    ({"prompt": [1], "length_penalty": 2}, "length_penalty"),
    ({"prompt": [1], "early_stopping": True}, "early_stopping"),
    ({**BEAMS, "stream": True}, "stream"),
    ({**BEAMS, "stream": False, "temperature": 0.7}, "temperature"),
    ({**BEAMS, "stream": False, "best_of": 0}, "best_of"),
    ({**BEAMS, "stream": False, "best_of": 33}, "best_of"),
    ({**BEAMS, "stream": False, "best_of": 10**6}, "best_of"),
    ({**BEAMS, "stream": False, "prompt": [[1]] * 20}, "best_of"),
    ({**BEAMS, "stream": False, "n": 5}, "n"),
    ({**BEAMS, "stream": False, "length_penalty": 1e9}, "length_penalty"),
    ({**BEAMS, "stream": False, "early_stopping": "soon"}, "early_stopping"),
    ({**BEAMS, "stream": False, "stop_token_ids": list(range(100, 150))}, "best_of"),
    *(
        ({**BEAMS, "stream": False, name: value}, name)
        for name, value in {
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 1,
            "frequency_penalty": 1,
            "logit_bias": {"5": 1},
            "stop": "x",
            "prompt_logprobs": 1,
            "allowed_token_ids": [5],
            "bad_words": ["the"],
            "response_format": {"type": "json_object"},
            "guided_choice": ["a", "b"],
        }.items()
    ),
    ({"prompt": [1], "use_beam_search": True, "stream": False, "n": 0}, "n"),
    ({"prompt": [1], "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt": [1], "lora_path": "x"}, "lora_path"),
    ({"prompt": [1], "repeat_penalty": 1.2}, "repeat_penalty"),
    ({"prompt": [1], "xtc_probability": 0.1}, "xtc_probability"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER], "prompt": "x"}, "prompt"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "x" * 513, "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools.0.function"),
    ({"messages": [USER], "tools": {}}, "tools"),
    ({"messages": [USER], "tools": [1]}, "tools.0"),
    ({"messages": [USER], "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"messages": [USER], "tools": [tool("")]}, "tools.0.function.name"),
    ({"messages": [USER], "tools": [tool("a\nb")]}, "tools.0.function.name"),
    ({"messages": [USER], "tools": [tool("x" * 129)]}, "tools.0.function.name"),
    ({"messages": [USER], "tools": [tool(7)]}, "tools.0.function.name"),
    ({"messages": [USER], "tools": [tool("f"), tool("f")]}, "tools.1.function.name"),
    ({"messages": [USER], "tools": [tool("f", parameters=[])]}, "tools.0.function.parameters"),
    ({"messages": [USER], "tools": [tool("f", strict="yes")]}, "tools.0.function.strict"),
    ({"messages": [USER], "tools": [tool(f"f{i}") for i in range(257)]}, "tools"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "tools": [tool("f")], "tool_choice": "always"}, "tool_choice"),
    ({"messages": [USER], "tools": [tool("f")], "tool_choice": chosen("g")}, "tool_choice"),
    ({"messages": [USER], "tools": [tool("f")], "tool_choice": {"type": "x"}}, "tool_choice"),
    ({"messages": [USER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [USER], "functions": [{"name": "f"}]}, "functions"),
    ({"messages": [USER], "function_call": {"name": "f"}}, "function_call"),
    ({"messages": [{**ANSWER, "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls.0.function"),
    ({"messages": [{**ANSWER, "tool_calls": [CALL] * 257}]}, "messages.0.tool_calls"),
    ({"messages": [USER], "documents": ["text"]}, "documents.0"),
    ({"messages": [USER], "chat_template": "{{ messages }}"}, "chat_template"),
    (
        {"messages": [ANSWER], "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
    ),
    ({"messages": [{**ANSWER, "tool_calls": [CALL]}], "continue_final_message": True}, "messages"),
    ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": [USER], "modalities": ["audio"]}, "modalities"),
    ({"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [USER], "logprobs": 3}, "logprobs"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a dog " * CONTEXT}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ({"messages": [USER], "audio": {"voice": "alloy"}}, "audio"),
    ({"messages": [USER], "echo": True}, "echo"),
    ({"messages": [USER], "best_of": 2}, "best_of"),
    ({"messages": [USER], "allowed_token_ids": []}, "allowed_token_ids"),
    ({"messages": [USER], "bad_words": [" "]}, "bad_words"),
    ({"messages": [USER], "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt is missing or empty"),
        ([[]], "prompt[0] has no tokens"),
        ([[1], [2, 3], []], "prompt[2] has no tokens"),
        (["a", ""], "prompt is missing or empty"),
        ([5, []], "prompt must be a string"),
        (["a", 5], "prompt must be a string"),
    ],
)
async def test_a_prompt_without_tokens_is_told_from_one_of_a_wrong_type(
    prompt: list[Any], words: str
) -> None:
    async with http_node() as node:
        body = {"prompt": prompt}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 400, "prompt")
        assert words in error["message"]
        assert not node.engine.requests


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
async def test_wrong_completions_name_the_parameter(body: dict[str, Any], param: str) -> None:
    async with http_node() as node:
        check_error(await node.client.post(COMPLETIONS, json=body), 400, param)
        streamed = await node.client.post(COMPLETIONS, json={"stream": True, **body})
        check_error(streamed, 400, param)
        assert not node.engine.requests


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
async def test_wrong_chats_name_the_parameter(body: dict[str, Any], param: str) -> None:
    async with http_node() as node:
        check_error(await node.client.post(CHATS, json=body), 400, param)
        assert not node.engine.requests


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1]",
        b"5",
        b"null",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"1" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=range(15),
)
async def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    async with http_node() as node:
        for url in (COMPLETIONS, CHATS):
            error = check_error(await node.client.post(url, content=raw), 400)
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 2**31}, "top_k must be 0 (off) to 2147483647"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, not -1"),
        ({"max_tokens": -1, "echo": True}, "max_tokens must be at least 0, not -1"),
        ({"stop": ["x"] * 10**4}, "stop has 10000 items, more than 64"),
        ({"stop_token_ids": [1] * 10**4}, "stop_token_ids has 10000 items, more than 256"),
        ({"metadata": [1] * 10**4}, "metadata has 10000 items, more than 4096"),
    ],
    ids=range(6),
)
async def test_limits_are_told_as_they_are(fields: dict[str, Any], words: str) -> None:
    async with http_node() as node:
        body = {"prompt": [1], **fields}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 400, next(iter(fields)))
        assert words in error["message"]


async def test_a_suffix_is_refused_as_what_is_not_built() -> None:
    async with http_node() as node:
        body = {"prompt": "a", "suffix": "b"}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 400, "suffix")
        assert error["code"] == "unsupported_parameter"
        assert error["message"].endswith("put both into the prompt")


async def test_the_context_message_has_both_numbers() -> None:
    async with http_node(strict_max_tokens=True) as node:
        body = {"prompt": [1] * 10, "max_tokens": CONTEXT}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 400, "max_tokens")
        assert f"10 + {CONTEXT} > {CONTEXT}" in error["message"]
        assert error["code"] == "context_length_exceeded"


async def test_unknown_models_paths_and_methods() -> None:
    async with http_node() as node:
        body = {"prompt": "x", "model": "gpt-7"}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 404, "model")
        assert error["code"] == "model_not_found"
        check_error(await node.client.post("/v1/nothing", json={}), 404)
        error = check_error(await node.client.post("/chat/completions", json={}), 404)
        assert "did you mean /v1/chat/completions?" in error["message"]
        assert "GET /v1/models" in error["message"]
        check_error(await node.client.get("/"), 404)
        check_error(await node.client.get(COMPLETIONS), 405)


async def test_a_body_too_large_is_refused_by_its_declared_length() -> None:
    async with http_node(max_body_bytes=4096) as node:
        error = check_error(await node.client.post(COMPLETIONS, content=b"x" * 10_000), 413)
        assert "4096" in error["message"]


async def test_ten_megabytes_are_too_many_by_default() -> None:
    async with http_node() as node:
        body = json.dumps({"prompt": "x" * (10 << 20)}).encode()
        check_error(await node.client.post(COMPLETIONS, content=body), 413)


async def test_a_body_too_large_is_refused_without_a_declared_length() -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async with http_node(max_body_bytes=4096) as node:
        check_error(await node.client.post(COMPLETIONS, content=endless()), 413)


async def test_a_body_that_does_not_arrive_times_out() -> None:
    async def stuck() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async with http_node(body_timeout_s=0.05) as node:
        check_error(await node.client.post(COMPLETIONS, content=stuck()), 408)


async def test_compressed_bodies_are_refused() -> None:
    async with http_node() as node:
        headers = {"content-encoding": "gzip"}
        check_error(await node.client.post(COMPLETIONS, content=b"x", headers=headers), 415)


async def test_a_text_far_too_long_is_refused_before_it_is_tokenised() -> None:
    async with http_node() as node:
        node.tokenizer.encode("warm")
        longest = node.tokenizer.max_token_length * CONTEXT
        error = check_error(
            await node.client.post(COMPLETIONS, json={"prompt": "x" * (longest + 1)}), 400, "prompt"
        )
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("header", ["nonsense", "a:b", "host:123456", "a:1,b", "x y:1"])
async def test_a_malformed_prefill_header(header: str) -> None:
    async with http_node() as node:
        headers = {"x-prefiller-host-port": header}
        response = await node.client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        check_error(response, 400, "x-prefiller-host-port")


# Keys, draining, overload ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic key-1", "key-1", "Bearer key-1x"]
)
async def test_wrong_keys(authorization: str | None) -> None:
    async with http_node(api_keys="key-1,key-2") as node:
        headers = {} if authorization is None else {"authorization": authorization}
        for url in ("/v1/models", "/nothing", "/v1/completions"):
            response = await node.client.get(url, headers=headers)
            error = check_error(response, 401)
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]


async def test_right_keys_and_open_paths() -> None:
    async with http_node(api_keys="key-1, key-2") as node:
        for key in ("key-1", "key-2"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await node.client.get("/v1/models", headers=headers)).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await node.client.get(path)).status_code == 200
        sneaky = {"host": "node/health"}
        assert (await node.client.get("/v1/models", headers=sneaky)).status_code == 401


async def test_a_key_may_come_as_anthropic_s_clients_show_it() -> None:
    async with http_node(api_keys="key-1") as node:
        for key, status in (("key-1", 200), ("key-2", 401)):
            response = await node.client.get("/v1/models", headers={"x-api-key": key})
            assert response.status_code == status


async def test_keys_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("file-key\n\n", encoding="utf-8")
    async with http_node(api_key_file=file) as node:
        headers = {"authorization": "Bearer file-key"}
        assert (await node.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await node.client.get("/v1/models")).status_code == 401


async def test_a_draining_node_finishes_and_refuses() -> None:
    async with http_node(auto=False) as node:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        running = asyncio.create_task(node.client.post(COMPLETIONS, json=body))
        fake = await node.engine.added()
        node.state.draining = True
        ready = await node.client.get("/ready")
        check_error(ready, 503)
        assert (await node.client.get("/health")).status_code == 200
        refused = await node.client.post(COMPLETIONS, json=body)
        assert check_error(refused, 503)["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        node.engine.produce_all(fake)
        assert len(chunks_of((await running).text)) >= 1


async def test_an_unhealthy_node_says_so() -> None:
    async with http_node() as node:
        node.state.unhealthy = "the engine has died"
        for path in ("/health", "/ready"):
            assert "died" in check_error(await node.client.get(path), 503)["message"]
        check_error(await node.client.post(COMPLETIONS, json={"prompt": "x"}), 503)


async def test_a_full_queue_is_429() -> None:
    async with http_node(max_waiting_requests=1) as node:
        response = await node.client.post(COMPLETIONS, json={"prompt": "x", "n": 2})
        check_error(response, 429)
        assert int(response.headers["retry-after"]) >= 1


# Failures in the middle ------------------------------------------------------------------------


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(url: str) -> None:
    body = {"prompt": "x"} if url == COMPLETIONS else {"messages": [USER]}
    async with http_node(auto=False) as node:
        for stream in (True, False):
            running = asyncio.create_task(node.client.post(url, json={**body, "stream": stream}))
            await node.engine.added()
            node.engine.die()
            check_error(await running, 503)
            node.engine.requests.clear()
            node.engine.is_dead = False
        node.engine.is_dead = True
        check_error(await node.client.post(url, json=body), 503)


@pytest.mark.parametrize("cause", ["dies", "aborts", "bug"])
async def test_a_failure_after_the_first_token_is_an_error_event(cause: str) -> None:
    async with http_node(auto=False) as node:
        body = {"prompt": "x", "max_tokens": 9, "stream": True, "return_token_ids": True}
        running = asyncio.create_task(node.client.post(COMPLETIONS, json=body))
        fake = await node.engine.added()
        node.engine.produce(fake, 2)
        if cause == "dies":
            node.engine.die()
        elif cause == "aborts":
            node.engine.abort(fake.request.request_id)
        else:
            fake.finished = True
            fake.state.give(ZeroDivisionError("a bug"))
        response = await running
        assert response.status_code == 200
        *chunks, last = sse_events(response.text)
        assert len(chunks) == 2 and "[DONE]" not in chunks
        error = json.loads(last)["error"]
        assert error["type"] in ("service_unavailable", "server_error")
        assert "a bug" not in error["message"]


async def test_bad_requests_do_not_hurt_others() -> None:
    async with http_node(auto=False) as node:
        good = asyncio.create_task(
            node.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 5, "stream": True})
        )
        fake = await node.engine.added()
        node.engine.produce(fake, 2)
        for body, _ in BAD_COMPLETIONS[:12]:
            await node.client.post(COMPLETIONS, json=body)
        node.engine.produce_all(fake)
        chunks = chunks_of((await good).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_one_failed_choice_ends_all() -> None:
    async with http_node(auto=False) as node:
        running = asyncio.create_task(
            node.client.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 5, "n": 3})
        )
        await node.engine.added(3)
        first = next(iter(node.engine.requests.values()))
        node.engine.abort(first.request.request_id)
        check_error(await running, 503)
        await until(lambda: all(f.finished for f in node.engine.requests.values()), "all ended")


# Anything --------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
NAMES = st.sampled_from(
    [*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "typo"]
)


@given(body=st.dictionaries(NAMES, JSON, max_size=6), raw=st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_body_is_more_than_a_bad_request(body: dict[str, Any], raw: bytes) -> None:
    try:
        encoded = json.dumps(body, allow_nan=True).encode()
    except UnicodeEncodeError:
        encoded = raw
    for content in (encoded, raw):
        for kind in (CompletionRequest, ChatCompletionRequest):
            try:
                parsed = parse_body(content, kind)
                assert not set(parsed.unknown_fields()) & kind.model_fields.keys()
                parsed.check_supported()
                parsed.sampling(lambda texts: [[1] for _ in texts])
                if isinstance(parsed, CompletionRequest):
                    parsed.prompts(CONTEXT)
            except HttpError as error:
                assert 400 <= error.status < 500
                assert json.loads(error.body())["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "logit_bias": {str(i): "a" for i in range(20_000)}},
        {str(i): 1 for i in range(20_000)},
        {"prompt": "a", "stream_options": {str(i): 1 for i in range(20_000)}},
        {"messages": [{}] * 20_000},
        {"messages": [{"role": "user", "content": [{}] * 20_000}]},
        {"messages": [USER], "chat_template_kwargs": {str(i): [1] for i in range(20_000)}},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 200}] * 100},
    ],
    ids=range(7),
)
def test_huge_objects_are_refused_by_their_size(body: dict[str, Any]) -> None:
    """Validating them item by item would stop the server for seconds."""
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    with pytest.raises(HttpError, match="more than"):
        parse_body(json.dumps(body).encode(), kind)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, b'{"messages": [' + b"0," * 1_100_000 + b"0]}"),
        (COMPLETIONS, b'{"prompt": [' + b"[5]," * 40_000 + b"[5]]}"),
        (COMPLETIONS, b'{"prompt": "a", "user": [' + b"[[]]," * 20_000 + b"[]]}"),
    ],
    ids=["messages", "prompts", "user"],
)
async def test_bodies_that_would_keep_the_node_busy_reach_no_parser(
    path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_node.http.routes.parse_body", None)
    async with http_node() as node:
        error = check_error(await node.client.post(path, content=body), 400)
        assert error["code"] == "request_too_complex"


async def test_prompts_are_counted_before_anybody_looks_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompletionRequest, "prompts", None)
    async with http_node() as node:
        body = {"prompt": ["ab"] * 60_000}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 400, "prompt")
        assert (
            "prompt has 60000 prompts" in error["message"] and "--max-choices" in error["message"]
        )


async def test_a_prompt_beyond_the_context_is_refused_by_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decode_node.protocol.completions._is_token_ids", None)
    async with http_node() as node:
        body = {"prompt": [5] * 500_000}
        error = check_error(await node.client.post(COMPLETIONS, json=body), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert "500000" in error["message"] and str(CONTEXT) in error["message"]


async def test_a_text_beyond_the_context_is_refused_in_tokens() -> None:
    """Tokens of a text are not counted if it cannot fit, whatever they are."""
    async with http_node() as node:
        longest = node.tokenizer.max_token_length
        text = "x" * (CONTEXT * longest + 1)
        body = {"messages": [{"role": "user", "content": text}]}
        error = check_error(await node.client.post(CHATS, json=body), 400, "messages")
        found = re.search(r"at least (\d+) tokens > (\d+) maximum", error["message"])
        assert found and int(found[1]) > CONTEXT and int(found[1]) * longest >= len(text)


async def test_what_is_done_to_a_long_body_leaves_the_event_loop_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parsing, the template, tokenising and the answer's log probabilities."""
    on_loop: list[str] = []
    seen: set[str] = set()

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen.add(name)
            if threading.current_thread() is threading.main_thread():
                on_loop.append(name)
            return work(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(decode_node.http.routes, "parse_body")
    watch(Tokenizer, "encode")
    watch(ChatTemplate, "render")
    watch(decode_node.answer.format, "prompt_logprobs")
    monkeypatch.setattr(decode_node.answer.answer, "_MANY_LOGPROBS", 4)
    async with http_node() as node:
        padding = {"user": "x" * 20_000}
        for url, body in (
            (COMPLETIONS, {"prompt": "a dog " * 8, "prompt_logprobs": 2}),
            (CHATS, {"messages": [USER]}),
        ):
            response = await node.client.post(url, json={**body, **padding, "max_tokens": 1})
            assert response.status_code == 200, response.text
    assert seen == {"parse_body", "encode", "render", "prompt_logprobs"}
    assert not on_loop


@pytest.mark.parametrize("url", [CHATS, "/v1/responses", "/v1/messages"])
async def test_a_bug_is_told_in_the_form_of_the_api(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("unhashable type: 'dict'")

    async with http_node() as node:
        monkeypatch.setattr(ChatTemplate, "render", fail)
        chat = {"messages": [USER], "max_tokens": 3}
        body = {"input": "hi", "max_output_tokens": 3} if url == "/v1/responses" else chat
        response = await node.client.post(url, json=body)
        if url == "/v1/messages":
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "api_error"
        else:
            assert check_error(response, 500)["code"] == "internal_error"
        assert "unhashable" not in response.text
        monkeypatch.undo()
        assert (await node.client.post(url, json=body)).status_code == 200
        await node.check_empty()
