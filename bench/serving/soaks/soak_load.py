"""The clients of a soak: requests that are left, asked again, or must end as they always did."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp

from bench.serving.openai_stream import Outcome, read_events
from bench.serving.soaks.soak_everything import is_as_asked, request_of

_LEFT_PART = 0.2
_NUM_PROMPTS = 42
_STUCK_S = 300.0
_ASK_AGAIN = (429, 503)
_ASK_AGAIN_S = 0.5
_BROKEN_OFF = "broken off"


class Soak:
    """One run against one cluster.

    Attributes:
        asked_to_wait: Answers that the cluster is too busy: asked again a little later.
        silences_s: The longest time without new text of each answer that streamed to its end.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, seed: int, *, tiers: bool, everything: bool,
        streams: bool,
    ) -> None:  # fmt: skip
        self._has_turns = tiers
        self._has_all = everything
        self._streams = streams
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        self.texts: dict[str, str] = {}
        self.others: list[tuple[int, str]] = []
        """Numbers and texts of answers that differ from the first one."""
        self._took_s: dict[int, float] = {}
        """The seconds of the last request with a prompt that was not left."""
        self.outcomes: Counter[str] = Counter()
        self.asked_to_wait: Counter[str] = Counter()
        self.silences_s: list[float] = []

    @property
    def num_done(self) -> int:
        return self.outcomes.total()

    async def run(self, num_requests: int, num_clients: int) -> None:
        numbers = iter(range(num_requests))
        await asyncio.gather(*(self._client(numbers) for _ in range(num_clients)))

    async def _client(self, numbers: Iterator[int]) -> None:
        for _ in numbers:
            is_left = self._random.random() < _LEFT_PART
            prompt = self._random.randrange(_NUM_PROMPTS)
            limit_s = self._random.random() * self._took_s.get(prompt, 1.0)
            started = time.monotonic()
            try:
                async with asyncio.timeout(limit_s if is_left else _STUCK_S):
                    self.outcomes[await self._ask(prompt)] += 1
                self._took_s[prompt] = time.monotonic() - started
            except TimeoutError:
                self.outcomes["left" if is_left else "stuck"] += 1
            except aiohttp.ClientError as error:
                self.outcomes[f"failed: {type(error).__name__}"] += 1

    async def _ask(self, prompt: int) -> str:
        """Returns what became of a request, which waits as long as the cluster asks it to."""
        path, body = self._request(prompt)
        while True:
            async with self._session.post(f"{self._url}{path}", json=body) as response:
                if response.content_type == "text/event-stream":
                    text = await self._stream(response)
                    break
                answer: dict[str, Any] = await response.json()
            if response.status == 200:
                text = text_of(answer)
                break
            message = answer["error"]["message"][:120]
            if response.status not in _ASK_AGAIN:
                return f"status {response.status}: {message}"
            self.asked_to_wait[f"status {response.status}: {message[:60]}"] += 1
            await asyncio.sleep(_ASK_AGAIN_S)
        if self._has_all and not is_as_asked(prompt, text):
            return "not what its schema says"
        if text.startswith(_BROKEN_OFF):
            return text
        known = self.texts.setdefault(str(prompt), text)
        if text != known:
            self.others.append((prompt, text))
        return "complete" if text == known else "other tokens than before"

    async def _stream(self, response: aiohttp.ClientResponse) -> str:
        """Returns the text of a stream; of one that breaks off, what it says instead."""
        now = time.perf_counter()
        outcome = Outcome(due=now, sent=now)
        await read_events(response, outcome)
        if outcome.error is not None:
            return f"{_BROKEN_OFF}: {outcome.error}"[:120]
        self.silences_s.append(outcome.longest_silence_s if outcome.chunks else 0.0)
        return outcome.text

    def _request(self, prompt: int) -> tuple[str, dict[str, Any]]:
        """Returns path and body."""
        tokens = [(7 * i + prompt) % 400 + 10 for i in range(3 + 9 * prompt)]
        if self._has_turns:
            tokens = self._turn(prompt)
        body = {
            "model": "demo",
            "prompt": tokens,
            "max_tokens": 4 + prompt,
            "temperature": 0.7 * (prompt % 2),
            "seed": prompt,
            "ignore_eos": True,
            "stream": self._streams,
        }
        return request_of(prompt, body) if self._has_all else ("/v1/completions", body)

    @staticmethod
    def _turn(prompt: int) -> list[int]:
        """Returns the prompt of a turn: of eight conversations, each some turns long."""
        conversation, turn = prompt % 8, prompt // 8
        return [(7 * i * i + conversation) % 400 + 10 for i in range(900 + 150 * turn)]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
