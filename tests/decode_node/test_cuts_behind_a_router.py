"""Whatever byte a decode node dies at, a router's client has one undisturbed answer.

The router's own journal takes the bytes of one node, and what the next node sends.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from decode_node.answer import answer
from router.relay.event_buffer import EventBuffer
from router.relay.journal import Journal, JournalEnd
from router.relay.journaled_relay import BodyOutlet, StreamOutlet
from tests.decode_node.chat_clients import MESSAGES, SCRIPT, TOOLS, thinking_tokenizer
from tests.decode_node.http_node import HttpNode, http_node

HEADERS = {"x-tandem-journal": "1", "x-request-id": "r1"}
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "n": 2, "seed": 0}),
    ("/v1/responses", {"input": "hello", "tools": FLAT_TOOLS, "seed": 0}),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": "hello"}, {"type": "compaction_trigger"}],
            "seed": 0,
        },
    ),
    (
        "/v1/messages",
        {"messages": MESSAGES, "tools": ANTHROPIC_TOOLS, "max_tokens": 500, "seed": 0},
    ),
]
DECISIONS = {
    "input": "hello",
    "questions": [
        {"type": "predicate", "instructions": "It rains."},
        {
            "type": "score",
            "instructions": "How much?",
            "levels": [{"label": "no"}, {"label": "so"}],
        },
    ],
}
CASES = [(*request, stream) for request in REQUESTS for stream in (True, False)] + [
    ("/v1/responses/compact", {"input": "hello", "seed": 0}, False),
    ("/v1/decisions", DECISIONS, False),
]
OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True)
def tell_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "JOURNAL_INTERVAL_S", 0.0)


def one_node() -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=[SCRIPT, "It rains."], context=1200)


async def ask(node: HttpNode, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    response = await node.client.post(path, content=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.content


def cuts_of(raw: bytes) -> list[int]:
    """Returns places before, in and behind the ends of events, and some in their middle."""
    ends = [found.end() for found in re.finditer(b"\n\n", raw)]
    near = {end + step for end in ends for step in (-1, 0, 1)}
    return sorted(cut for cut in near | set(range(0, len(raw), 997)) if 0 <= cut < len(raw))


class Received:
    """Is a client, as the router's outlets see one."""

    def __init__(self) -> None:
        self.body = b""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert status == 200

    async def write(self, data: bytes, *, more: bool) -> None:
        self.body += data


class Relay:
    """Takes the bytes of one node after another, as the router does."""

    def __init__(self, *, stream: bool) -> None:
        self.journal = Journal()
        self.client: Any = Received()
        self._outlet = (StreamOutlet if stream else BodyOutlet)(self.client, [])

    async def take(self, raw: bytes) -> None:
        if passed := self.journal.take(EventBuffer(len(raw)).feed(raw)):
            await self._outlet.write(passed)

    async def end(self) -> bytes:
        assert self.journal.end is JournalEnd.COMPLETE
        await self._outlet.end(b"", 200)
        return without_time(self.client.body)


@pytest.mark.parametrize(
    ("path", "fields", "stream"), CASES, ids=[f"{path}-{stream}" for path, _, stream in CASES]
)
async def test_whatever_byte_a_node_dies_at(
    path: str, fields: dict[str, Any], stream: bool
) -> None:
    body = json.dumps({**fields, **(OPTIONS if stream else {})}).encode()
    async with one_node() as first, one_node() as second:
        raw = await ask(first, path, body, HEADERS)
        undisturbed = Relay(stream=stream)
        await undisturbed.take(raw)
        expected = await undisturbed.end()
        known: dict[bytes, bytes] = {}
        for cut in cuts_of(raw):
            relay = Relay(stream=stream)
            await relay.take(raw[:cut])
            if relay.journal.end is None:
                again, headers = relay.journal.resume(body, HEADERS)
                if again not in known:
                    known[again] = await ask(second, path, again, headers)
                await relay.take(known[again])
            assert await relay.end() == expected, cut


def without_time(answer: bytes) -> bytes:
    """Returns an answer without its creation, and the ids that tell of it, which an answer has of
    its own that was begun anew before its client had anything."""
    answer = re.sub(rb'"created(_at)?":\d+', b"", answer)
    return re.sub(
        rb'"(call_|rs_|msg_|fc_)[0-9a-f]{24,32}"|"signature":"[0-9a-f]+"', b'"id"', answer
    )
