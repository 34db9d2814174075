"""Structured answers of models that think, and of nodes that die amid a document."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.tokenizer import load_grammar_tokenizer
from tests.decode_node.chat_clients import CHAT, MESSAGES, thinking_tokenizer
from tests.decode_node.http_node import HttpNode, http_node
from tests.decode_node.test_journal import ask, without_cache_note
from tests.engine.tiny_model import tiny_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
DOCUMENT = '{"a": "größer → 12"}'
OPEN = {"chat_template_kwargs": {"open_thinking": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@cache
def grammar_tokenizer(folder: Path) -> LLTokenizer:
    tokenizer = thinking_tokenizer()
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    size = tokenizer.vocab_size
    return load_grammar_tokenizer(tiny_model(path=str(folder), vocab_size=size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def takes(folder: Path, grammar: str, text: str) -> bool:
    """Says whether `text`, in which special tokens are such, is an answer under the grammar."""
    matcher = LLMatcher(grammar_tokenizer(folder), grammar, log_level=0)
    ids = thinking_tokenizer().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@asynccontextmanager
async def node_with(script: str) -> AsyncIterator[HttpNode]:
    async with http_node(tokenizer=thinking_tokenizer(), scripts=[script], context=1200) as node:
        yield node


async def answer(script: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Returns the grammar that the engine got, and the message."""
    async with node_with(script) as node:
        response = await node.client.post(CHAT, json={"messages": MESSAGES, "seed": 0, **fields})
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        return node.engine.only.request.spec.sampling.grammar, message


async def test_a_document_comes_behind_the_thinking(folder: Path) -> None:
    script = f"<think>hm, a {{</think>{DOCUMENT}"
    grammar, message = await answer(script, response_format=FORMAT)
    assert (message["reasoning_content"], message["content"]) == ("hm, a {", DOCUMENT)
    assert takes(folder, grammar, script) and takes(folder, grammar, DOCUMENT)
    assert not takes(folder, grammar, f"hm{DOCUMENT}")


async def test_thinking_that_the_prompt_opened_is_gone_on_with(folder: Path) -> None:
    grammar, message = await answer(f"so</think>{DOCUMENT}", response_format=FORMAT, **OPEN)
    assert (message["reasoning_content"], message["content"]) == ("so", DOCUMENT)
    assert takes(folder, grammar, f"so</think>{DOCUMENT}")
    assert not takes(folder, grammar, DOCUMENT)


async def test_without_thinking_the_document_is_all(folder: Path) -> None:
    grammar, message = await answer(DOCUMENT, response_format=FORMAT, **OFF)
    assert message["content"] == DOCUMENT
    assert takes(folder, grammar, DOCUMENT)
    assert not takes(folder, grammar, f"<think></think>{DOCUMENT}")


@pytest.mark.parametrize("fields", [{}, {"response_format": FORMAT}])
async def test_a_budget_of_thinking_is_a_grammar(folder: Path, fields: dict[str, Any]) -> None:
    grammar, _ = await answer(f"ab</think>{DOCUMENT}", thinking_token_budget=2, **fields, **OPEN)
    assert takes(folder, grammar, f"ab</think>{DOCUMENT}")
    assert not takes(folder, grammar, f"abc</think>{DOCUMENT}")
    free = "ab</think>hi <tool_call>{}</tool_call>"
    assert takes(folder, grammar, free) is not bool(fields)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"thinking_budget": 2}, "thinking_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 2}}, "reasoning.max_tokens"),
    ],
)
async def test_a_budget_has_the_names_of_all_makers(
    folder: Path, fields: dict[str, Any], place: str
) -> None:
    grammar, _ = await answer(f"ab</think>{DOCUMENT}", **fields, **OPEN)
    assert takes(folder, grammar, f"ab</think>{DOCUMENT}")
    assert not takes(folder, grammar, f"abc</think>{DOCUMENT}")
    raised = json.loads(json.dumps(fields).replace("2", str(1 << 30)))
    async with node_with("a</think>b") as node:
        response = await node.client.post(CHAT, json={"messages": MESSAGES, **raised})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, place)
    assert error["message"].startswith(place)


async def test_no_budget_is_no_grammar() -> None:
    for budget in (None, -1):
        grammar, _ = await answer("a</think>b", thinking_token_budget=budget, **OPEN)
        assert grammar == ""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [DOCUMENT, f"<think>hm</think>{DOCUMENT}"])
async def test_wherever_a_node_dies_the_document_goes_on(script: str, stream: bool) -> None:
    """Another node makes the same grammar of the same body; the tokens are replayed under it."""
    body = {"messages": MESSAGES, "seed": 0, "response_format": FORMAT, "stream": stream}
    async with node_with(script) as first, node_with(script) as second:
        whole = await ask(first, CHAT, body)
        for cut in range(1, len(whole) if stream else len(whole) - 1):
            rest = await ask(second, CHAT, body, whole[:cut])
            assert without_cache_note(whole[:cut]) + without_cache_note(rest) == without_cache_note(
                whole
            )
        (expected,) = {
            fake.request.spec.sampling.grammar for fake in first.engine.requests.values()
        }
        found = {fake.request.spec.sampling.grammar for fake in second.engine.requests.values()}
        assert found <= {expected} and json.dumps(SCHEMA)[1:-1] in expected


async def test_a_completion_thinks_only_where_its_prompt_has_begun_to(folder: Path) -> None:
    thinking = f"so</think>{DOCUMENT}"
    for prompt, opens in (("go: <think>\n", True), ("go:", False), ("<think>a</think>\n", False)):
        for asked in (prompt, thinking_tokenizer().encode(prompt)):
            async with node_with(DOCUMENT) as node:
                body = {"prompt": asked, "response_format": FORMAT, "seed": 0}
                response = await node.client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                grammar = node.engine.only.request.spec.sampling.grammar
            assert takes(folder, grammar, thinking) is opens
            assert takes(folder, grammar, DOCUMENT) is not opens
            assert not takes(folder, grammar, f"<think>{thinking}") or opens
