"""Answers chat completions as a decode node does, without an engine, and says what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]


@dataclass
class ChatNode:
    """Handler for a `FakeDecodeNode`. It answers with the last message's content, when `may_go` is
    set. `status_of` says with which status."""

    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)
    bodies: list[Json] = field(default_factory=list)
    status_of: Callable[[str, int], int] = lambda text, times: 200
    num_open: int = 0
    most_open: int = 0

    def __post_init__(self) -> None:
        self.may_go.set()

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = str(body["messages"][-1]["content"])
        self.asked[text] += 1
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.may_go.wait()
        finally:
            self.num_open -= 1
        status = self.status_of(text, self.asked[text])
        if status != 200:
            error = {"message": f"no: {text}", "type": "t", "param": None, "code": "c"}
            return web.json_response({"error": error}, status=status)
        message = {"role": "assistant", "content": f"seen {text}"}
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }
        return web.json_response(answer)


def line(name: str, text: str | None = None, **changes: Any) -> Json:
    """Returns a line of a batch's file."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text or name}]}
    found = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {key: value for key, value in {**found, **changes}.items() if value is not ...}


def jsonl(lines: list[Json]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)
