"""Speaks /v1/responses as a decode node does, without an engine, and says what it was asked."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from edge.http import headers as names
from edge.http.answers.kept_response import KeptResponse
from tests.router.fakes import open_stream

Json = dict[str, Any]


@dataclass
class ResponseNode:
    """Handler for a `FakeDecodeNode`. Its answer to n items is "seen n", a word at a time. It waits
    for `may_go` behind its first word. `refusals` are statuses that it answers first,
    `check_refusals` those with which it first answers whether it would."""

    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[Json] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    checked: list[Json] = field(default_factory=list)
    check_refusals: list[int] = field(default_factory=list)
    extra: list[Json] = field(default_factory=list)
    num_cut: int = 0

    def __post_init__(self) -> None:
        self.may_go.set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kept = KeptResponse.of_header(request.headers.get(names.RESPONSE, "")) or KeptResponse()
        if kept.is_check:
            return self._checked(body)
        self.bodies.append(body)
        if self.refusals:
            return _refusal(self.refusals.pop(0), "no")
        try:
            return await self._answer(request, body, kept)
        except (asyncio.CancelledError, ConnectionError):
            self.num_cut += 1
            raise

    def _checked(self, body: Json) -> web.Response:
        self.checked.append(body)
        if self.check_refusals:
            return _refusal(self.check_refusals.pop(0), "not that")
        return web.json_response({"object": "response.input_tokens", "input_tokens": 1})

    async def _answer(
        self, request: web.Request, body: Json, kept: KeptResponse
    ) -> web.StreamResponse:
        words = ["seen ", str(len(body["input"]))]
        item = {
            "type": "message",
            "id": f"msg_{len(self.bodies)}_{time.monotonic_ns()}",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "".join(words), "annotations": []}],
        }
        if not body.get("stream"):
            await self.may_go.wait()
            return web.json_response(self.response(body, kept, "completed", [*self.extra, item]))
        stream = await open_stream(request)
        number = kept.num_events
        begun = self.response(body, kept, "in_progress", [])
        named: list[tuple[str, Json]] = [("response.in_progress", {"response": begun})]
        if not number:
            named.insert(0, ("response.created", {"response": begun}))
        named += [("response.output_text.delta", {"delta": word}) for word in words]
        done = self.response(body, kept, "completed", [*self.extra, item])
        named.append(("response.completed", {"response": done}))
        for name, fields in named:
            data = json.dumps({"type": name, "sequence_number": number, **fields})
            await stream.write(f"event: {name}\ndata: {data}\n\n".encode())
            number += 1
            if fields.get("delta") == words[0]:
                await self.may_go.wait()
        return stream

    def response(self, body: Json, kept: KeptResponse, status: str, output: list[Json]) -> Json:
        return {
            "id": kept.id or "resp_own",
            "object": "response",
            "created_at": kept.created_at,
            "status": status,
            "error": None,
            "model": body.get("model", "demo"),
            "output": output,
            "usage": None,
            "instructions": body.get("instructions"),
            **kept.echoed_fields(),
        }


def _refusal(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "t", "param": "text.format", "code": "c"}
    return web.json_response({"error": error}, status=status)
