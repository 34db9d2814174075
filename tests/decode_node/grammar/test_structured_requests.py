"""Structured output over HTTP: what reaches the engine, and what is refused before it does."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest

from decode_node.grammar.structured_output import Constraint
from tests.decode_node.grammar.hostile import HOSTILE_GRAMMARS, HOSTILE_SCHEMAS
from tests.decode_node.http_node import HttpNode, http_node

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TWO = {"a": {"type": "integer"}, "b": {"type": "string"}}
SWAPPED = dict(reversed(TWO.items()))
GRAMMAR = 'root ::= "a" b\nb ::= "c"'
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    return {**prompt, "max_tokens": 2, **fields}


async def ask(node: HttpNode, path: str, **fields: Any) -> Any:
    response = await node.client.post(path, json=body_of(path, **fields))
    return response.status_code, response.json()


def grammars(node: HttpNode) -> list[str]:
    return [fake.request.spec.sampling.grammar for fake in node.engine.requests.values()]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": FORMAT}, '"integer"'),
        ({"response_format": {"type": "json_object"}}, '"object"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, '"integer"'),
        ({"structured_outputs": {"regex": "[ab]+c"}}, "[ab]+c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, '"yes" | "no"'),
        ({"guided_json": SCHEMA}, '"integer"'),
        ({"guided_grammar": GRAMMAR}, "lark_grammar"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": json.dumps(SCHEMA)}}, '"integer"'),
        ({"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR}}, "lark_grammar"),
        ({"response_format": {"type": "text"}}, ""),
    ],
)
async def test_the_engine_gets_the_grammar(path: str, fields: dict[str, Any], part: str) -> None:
    async with http_node() as node:
        status, _ = await ask(node, path, n=2, **fields)
        assert status == 200
        first, second = grammars(node)
        assert first == second and part in first and bool(first) is bool(part)


async def test_each_prompt_of_a_completion_has_the_grammar() -> None:
    async with http_node() as node:
        status, _ = await ask(node, COMPLETIONS, prompt=["a", "b"], guided_regex="x")
        first, second = grammars(node)
        assert status == 200 and first == second and first.endswith("start: /x/\n")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"not": {}}}, "guided_json", "the keyword not is not supported"),
    (
        {"response_format": {**FORMAT, "json_schema": {"schema": {"not": {}}, "strict": True}}},
        "response_format",
        "the keyword not is not supported",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {"not": {}}}},
        "response_format",
        "the keyword not is not supported",
    ),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    (
        {"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR + "\n"}},
        "guided_grammar",
        "exclude each other",
    ),
    (
        {"guided_json": {"const": 1}, "structured_outputs": {"json": {"const": True}}},
        "guided_json",
        "exclude each other",
    ),
    (
        {"guided_json": {"properties": TWO}, "json_schema": {"properties": SWAPPED}},
        "json_schema",
        "exclude each other",
    ),
    ({"guided_json": SCHEMA, "ignore_eos": True}, "ignore_eos", "structured output"),
    ({"guided_grammar": "}{"}, "guided_grammar", "neither Lark"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "--reasoning-parser"),
    ({"structured_outputs": {"json": "["}}, "structured_outputs.json", "not valid JSON"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
async def test_what_cannot_be_kept_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    async with http_node() as node:
        status, answer = await ask(node, path, **fields)
        assert (status, answer["error"]["param"]) == (400, param)
        assert said in answer["error"]["message"]
        assert not node.engine.requests, "nothing was computed"


@pytest.mark.usefixtures("no_garbage_collection")
async def test_hostile_bodies_cost_a_running_stream_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is refused. What is measured is this process, which all streams go through: the time
    that it computes, and the longest that it does so without a pause."""
    caplog.set_level(logging.DEBUG)
    async with http_node() as node:
        await ask(node, CHAT, guided_json=SCHEMA)
        longest, is_over = 0.0, False

        async def watch() -> None:
            nonlocal longest
            last = time.thread_time()
            while not is_over:
                await asyncio.sleep(0.001)
                now = time.thread_time()
                longest, last = max(longest, now - last), now

        watching = asyncio.create_task(watch())
        for name, schema in HOSTILE_SCHEMAS.items():
            status, answer = await ask(node, CHAT, guided_json={**schema, "title": "http"})
            assert status == 400, name
            assert answer["error"]["param"] == "guided_json"
        for name, grammar in HOSTILE_GRAMMARS.items():
            status, answer = await ask(node, CHAT, guided_grammar=grammar + "\n")
            assert status == 400, name
        is_over = True
        await watching
        assert longest < 0.1
        assert (await ask(node, CHAT, guided_json=SCHEMA))[0] == 200
    assert "multipleOf" not in caplog.text and "r399" not in caplog.text


async def test_checks_are_counted() -> None:
    async with http_node() as node:
        before = await node.metrics()
        await ask(node, CHAT, guided_regex="counted")
        await ask(node, CHAT, guided_regex="counted")
        await ask(node, CHAT, guided_regex="(counted")
        after = await node.metrics()

    def grown(outcome: str) -> float:
        name = f"tandem_grammar_checks_total{json.dumps({'outcome': outcome})}"
        return after[name] - before[name]

    assert [grown(outcome) for outcome in ("accepted", "known", "refused")] == [1, 1, 1]


def test_what_is_nested_too_deeply_to_be_compared_is_not_the_same() -> None:
    tag: Any = 1
    for _ in range(100_000):
        tag = {"a": tag}
    first = Constraint("structural_tag", "structural_tag", tag)
    assert not first.says_the_same_as(first)
