"""A node that answers when it is let, and a client that notes what comes through a proxy."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from tests.router.fakes import event, open_stream

BODY = {"model": "demo", "prompt": "hello", "stream": True}
DONE = b"data: [DONE]\n\n"


@dataclass
class PausingNode:
    """Answers with two tokens: each comes after a pause."""

    pause_s: float

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.pause_s)
        response = await open_stream(request)
        await response.write(event(0))
        await asyncio.sleep(self.pause_s)
        await response.write(event(1) + DONE)
        return response


@dataclass
class SteppingNode:
    """Answers token by token: the next one comes when the client has the one before."""

    num_tokens: int
    may_go_on: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for index in range(self.num_tokens):
            await response.write(event(index))
            await self.may_go_on.get()
        await response.write(DONE)
        return response


@dataclass(frozen=True, slots=True)
class Seen:
    """Is what a client saw. `data` has no comments; `longest_s`: without a byte. `broke` says how
    the connection ended if it did not in order."""

    status: int
    data: bytes
    num_comments: int
    longest_s: float
    broke: str = ""

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.data == event(0) + event(1) + DONE and not self.broke


async def read_stream(client: aiohttp.ClientSession, url: str) -> Seen:
    parts: list[bytes] = []
    last, longest_s, broke = time.monotonic(), 0.0, ""
    async with client.post(f"{url}/v1/completions", json=BODY) as response:
        try:
            async for chunk in response.content.iter_any():
                now = time.monotonic()
                longest_s, last = max(longest_s, now - last), now
                parts.append(chunk)
        except aiohttp.ClientError as error:
            broke = type(error).__name__
        status = response.status
    events = b"".join(parts).split(b"\n\n")
    data = b"".join(one + b"\n\n" for one in events if one and not one.startswith(b":"))
    return Seen(status, data, sum(one.startswith(b":") for one in events), longest_s, broke)
