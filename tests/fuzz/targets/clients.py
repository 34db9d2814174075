"""Bodies that clients send to a decode node: an answer, or an error of the API. Never a 500."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import httpx
from hypothesis import strategies as st

from edge.http.bodies.json_counter import MAX_DEPTH, JsonCounter
from edge.http.errors import BadRequest
from router.edge.key_file import read_keys
from router.errors import ConfigurationError
from router.request.info import read_request_info
from tests.decode_node.http_node import HttpNode, http_node
from tests.fuzz.damage import JSON, altered, damaged, json_bytes
from tests.fuzz.target import Fault, Target, judged

_SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 3,
    "stop": ["x"],
    "logit_bias": {"5": -1.0},
    "n": 1,
    "logprobs": 1,
    "echo": False,
    "presence_penalty": 0.1,
    "bad_words": ["no"],
    "stop_token_ids": [3],
    "ignore_eos": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}]
_TEXT = {"type": "text", "text": "hm"}
_PIXEL = "data:image/png;base64,iVBORw0KGgo="
_BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "hi", **_SAMPLING}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": _CALLS},
                {"role": "tool", "tool_call_id": "c", "content": "42"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": [_TEXT]}]},
            ],
            "tools": [_TOOL],
            "tool_choice": "auto",
            "max_tokens": 2,
            "stream_options": None,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PIXEL}}]}
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "integer"}},
            },
            "chat_template_kwargs": {"a": 1},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "42"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            ],
            "instructions": "i",
            "max_output_tokens": 2,
            "reasoning": {"effort": "low"},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "text"}},
            "truncation": "auto",
            "include": [],
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "42"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
        },
    ),
    (
        "/v1/responses/compact",
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "compaction", "encrypted_content": "tandem-summary:so"},
                {"type": "compaction_trigger"},
            ],
        },
    ),
    (
        "/v1/decisions",
        {
            "input": [{"role": "user", "content": [{"type": "input_json", "data": {"a": [1]}}]}],
            "questions": [
                {"type": "predicate", "instructions": [{"type": "input_text", "text": "so"}]},
                {
                    "type": "choice",
                    "instructions": "?",
                    "choices": [{"value": "a"}, {"value": True}],
                },
                {"type": "score", "instructions": "?", "levels": [{"label": "a"}, {"label": "b"}]},
            ],
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}),
    (
        "/generate",
        {
            "text": "hi",
            "image_data": [_PIXEL, {"url": "iVBORw0KGgo="}],
            "sampling_params": {"max_new_tokens": 2, "stop": ["x"]},
            "priority": 3,
            "rid": "r",
        },
    ),
]
_ASKED = [
    *_BODIES,
    ("/abort_request", {"rid": "a", "abort_all": True}),
    ("/abort_requests", {"request_ids": ["a"]}),
]
"""Bodies besides that operators send to a node, which routers do not pass on."""


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    """Draws a byte for the route, then a body."""
    number = draw(st.integers(0, len(_ASKED) - 1))
    body = draw(st.one_of(altered(_ASKED[number][1], 3), altered(_ASKED[number][1], 3), JSON))
    return bytes([number]) + draw(
        damaged(st.just(json_bytes(body)), draw(st.sampled_from([0, 0, 1])))
    )


class _Node:
    """A decode node without an engine, on an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.faults: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self._context = http_node(context=1024)
        self.node: HttpNode = self.loop.run_until_complete(self._context.__aenter__())

    def post(self, path: str, body: bytes) -> httpx.Response:
        asked = asyncio.wait_for(self.node.client.post(path, content=body), 30)
        answer = self.loop.run_until_complete(asked)
        if self.faults:
            raise Fault(f"the loop has seen {self.faults.pop()}")
        return answer


@cache
def _node() -> _Node:
    return _Node()


def _check_request(data: bytes) -> None:
    if not data:
        return
    path, _ = _ASKED[data[0] % len(_ASKED)]
    answer = _node().post(path, data[1:])
    if answer.status_code == 200:
        return
    if not 400 <= answer.status_code < 500:
        raise Fault(f"{path} answers {answer.status_code}: {answer.text[:300]}")
    message = answer.json()["error"]["message"]
    if not (isinstance(message, str) and " " in message and len(message) < 4000):
        raise Fault(f"{path} says {message!r}")


# Routers ------------------------------------------------------------------------------------------


def _check_info(data: bytes) -> None:
    """A router reads of any body what it needs, and counts it before."""
    if not data:
        return
    path, _ = _BODIES[data[0] % len(_BODIES)]

    def read() -> None:
        counter = JsonCounter()
        counter.feed(data[1:])
        try:
            whole = json.loads(data[1:])
        except (ValueError, RecursionError):
            whole = None
        if whole is not None and _depth(whole) > MAX_DEPTH:
            raise Fault("what is nested deeper than counted was let through")
        read_request_info(path, "r", {}, data[1:])

    judged(read, BadRequest)


def _depth(value: Any) -> int:
    """Returns how many lists and objects lie in each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


_KEYS = b"""
[[tenants]]
name = "acme"
keys = ["sha256:%s"]
requests_per_s = 20
priority = "interactive"
salt = "s"
[[tenants]]
name = "other"
keys = ["sha256:%s", "sha256:%s"]
""" % (b"0" * 64, b"1" * 64, b"2" * 64)


def _check_keys(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    judged(lambda: read_keys(text), ConfigurationError)


TARGETS = [
    Target(name="bodies", inputs=_requests(), check=_check_request, examples=600),
    Target(name="routed_bodies", inputs=_requests(), check=_check_info, examples=500),
    Target(name="key_files", inputs=damaged(st.just(_KEYS), 5), check=_check_keys, examples=500),
]
