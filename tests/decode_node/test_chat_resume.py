"""A chat that another node continues has the thoughts, calls and ids of one node's answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decode_node.answer import answer
from tests.decode_node.chat_clients import (
    CHAT,
    MESSAGES,
    SCRIPT,
    TOOLS,
    accumulated,
    as_accumulated,
    groups,
    thinking_tokenizer,
)
from tests.decode_node.http_node import chunks_of, http_node
from tests.decode_node.test_journal import ask, data_of, entries_of, without_cache_note

SCRIPTS = [SCRIPT, "<think>größer</think>no call 日本語"]
BODIES: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
    {"n": 2},
    {"max_tokens": 80, "n": 2},
    {"stop": ["I look"]},
]
"""Requests, but for what all have."""


@pytest.fixture(autouse=True)
def tell_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "JOURNAL_INTERVAL_S", 0.0)


def one_node() -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=SCRIPTS, context=1200)


def body_of(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": TOOLS, "seed": 0, **fields}


def chunks(events: list[str]) -> list[dict[str, Any]]:
    """Returns the chunks of a complete stream without what only routers read."""
    return chunks_of("".join(data_of(event) + "\n\n" for event in events))


@pytest.mark.parametrize("fields", BODIES)
async def test_wherever_a_stream_is_cut_it_goes_on(fields: dict[str, Any]) -> None:
    body = body_of(**fields, stream=True, stream_options={"include_usage": True})
    async with one_node() as first, one_node() as second, one_node() as third:
        third.engine.tokens_per_output = 3
        whole = groups(await ask(first, CHAT, body))
        expected = accumulated(chunks(whole))
        for cut in range(1, len(whole)):
            rest = groups(await ask(second, CHAT, body, whole[:cut]))
            assert without_cache_note([*whole[:cut], *rest]) == without_cache_note(whole)
            rest = await ask(third, CHAT, body, whole[:cut])
            found = chunks([*whole[:cut], *rest])
            assert accumulated(found) == expected
            assert found[-1]["usage"] == chunks(whole)[-1]["usage"]


@pytest.mark.parametrize("fields", BODIES)
async def test_wherever_a_whole_answer_is_cut_it_goes_on(fields: dict[str, Any]) -> None:
    body = body_of(**fields)
    async with one_node() as first, one_node() as second:
        whole = await ask(first, CHAT, body)
        expected = data_of(whole[-2])
        for cut in range(1, len(whole) - 1):
            rest = await ask(second, CHAT, body, whole[:cut])
            assert data_of(rest[-2]) == expected
    answer = json.loads(expected.removeprefix("data: "))
    has_calls = [bool(as_accumulated(choice).calls) for choice in answer["choices"]]
    assert has_calls[0] == ("stop" not in fields)


async def test_what_a_parser_keeps_back_is_not_in_the_journal() -> None:
    """Tokens are noted with the event that tells of them: those behind it are computed again."""
    body = body_of(stream=True)
    async with one_node() as node:
        events = await ask(node, CHAT, body)
        noted = 0
        for event in events:
            shown = data_of(event)
            tokens = [json.loads(e.partition(" ")[2]) for e in entries_of(event)]
            noted += sum(len(entry[2]) for entry in tokens if entry[0] == "tokens")
            assert shown or not tokens
        assert noted == len(node.engine.scripts[0])
