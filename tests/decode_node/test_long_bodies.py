"""Long bodies of the other APIs are read and said as chats beside the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from decode_node.protocol.messages.messages import CountTokensRequest
from decode_node.protocol.responses.responses import ResponsesRequest
from edge.http.event_loop import long_work
from tests.decode_node.http_node import http_node

RESPONSES: dict[str, Any] = {"input": "hello"}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
ASKS: list[tuple[str, type, dict[str, Any]]] = [
    ("/v1/responses", ResponsesRequest, {**RESPONSES, "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", ResponsesRequest, RESPONSES),
    ("/v1/messages", CountTokensRequest, {**MESSAGES, "max_tokens": 2}),
    ("/v1/messages/count_tokens", CountTokensRequest, MESSAGES),
]


@pytest.mark.parametrize(("path", "kind", "body"), ASKS)
async def test_the_event_loop_walks_through_no_long_body(
    path: str, kind: type, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of others pass through the loop meanwhile."""
    seen: list[tuple[str, bool]] = []

    def noted(name: str) -> Any:
        work = getattr(kind, name)

        def note(*args: Any) -> Any:
            seen.append((name, threading.current_thread().name.startswith("long-bodies")))
            return work(*args)

        return note

    for name in ("unknown_fields", "to_chat"):
        monkeypatch.setattr(kind, name, noted(name))
    padding = {"metadata": {"a": "x" * long_work.LONG_BODY}}
    async with http_node() as node:
        for is_long in (True, False):
            answer = await node.client.post(path, json=body | (padding if is_long else {}))
            assert answer.status_code == 200, answer.text
            assert seen == [("unknown_fields", is_long), ("to_chat", is_long)]
            seen.clear()
