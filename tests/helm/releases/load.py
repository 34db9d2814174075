"""Clients that stream answers one after the other, and notice everything that is wrong with one.

    async with Load(url, expected) as load:
        ...                       whatever is done to the cluster meanwhile
        await load.answers(10)    ten more from here on
    assert not load.faults

Every request opens a connection of its own, as behind a load balancer. Which answer is right is
known beforehand: an answer is the same on whichever node it is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import aiohttp

_PAUSE_S = 0.4
"""The seconds between two requests of a client, unless answers are waited for: pods that start need
time.
"""
_NUM_CLIENTS = 2
_ANSWER_S = 60.0


def body(i: int, max_tokens: int = 16) -> dict[str, Any]:
    """Returns the body of request `i`, which is always the same."""
    rng = random.Random(i)
    return {
        "model": "demo",
        "stream": True,
        "prompt": [10 + i, *(rng.randrange(10, 400) for _ in range(rng.choice([8, 40, 120])))],
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.8]),
        "seed": i,
        "ignore_eos": True,
    }


class BadAnswer(Exception):
    """Says what is wrong with an answer."""


async def stream(url: str, wish: dict[str, Any], on_text: asyncio.Event | None = None) -> str:
    """Returns the text of a complete answer. Raises `BadAnswer`."""
    text, last = "", ""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=wish) as response,
        ):
            if response.status != 200:
                raise BadAnswer(f"status {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: "):
                    last = line[6:].decode().strip()
                    text += _text(last)
                    if text and on_text is not None:
                        on_text.set()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BadAnswer(f"{error!r} after {len(text)} characters") from error
    if last != "[DONE]":
        raise BadAnswer(f"ended with {last!r}")
    return text


def _text(data: str) -> str:
    if data == "[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise BadAnswer(f"an error event: {event['error']}")
    return "".join(choice["text"] for choice in event["choices"])


class Load:
    """Sends requests. `expected`: the text of request 0, 1, …; `faults`: one line for each that was
    not so.
    """

    def __init__(self, url: str, expected: Sequence[str]) -> None:
        self._url = url
        self._expected = expected
        self._numbers = itertools.count()
        self._clients: list[asyncio.Task[None]] = []
        self._is_over = False
        self._answered = asyncio.Condition()
        self._num_waiting = 0
        self.num_answers = 0
        self.faults: list[str] = []

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.create_task(self._client()) for _ in range(_NUM_CLIENTS)]
        await self.answers(_NUM_CLIENTS)
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Open answers end; no new ones begin."""
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def answers(self, count: int) -> None:
        """Waits until `count` more answers have ended, well or not."""
        goal = self.num_answers + count
        self._num_waiting += 1
        try:
            async with self._answered, asyncio.timeout(_ANSWER_S):
                await self._answered.wait_for(lambda: self.num_answers >= goal)
        finally:
            self._num_waiting -= 1

    async def _client(self) -> None:
        while not self._is_over:
            number = next(self._numbers) % len(self._expected)
            try:
                text = await stream(self._url, body(number))
                if text != self._expected[number]:
                    self.faults.append(f"request {number}: {text!r}")
            except BadAnswer as fault:
                self.faults.append(f"request {number}: {fault}")
            self.num_answers += 1
            async with self._answered:
                self._answered.notify_all()
            await asyncio.sleep(0 if self._num_waiting else _PAUSE_S)
