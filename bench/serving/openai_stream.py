"""One streamed completion as a client sees it: what came, and when.

The definitions are those of every latency figure here. A chunk is an event with new text or token
ids; times are of its arrival.

    sent ──── TTFT ────▶ chunk ─ ITL ▶ chunk ─ ITL ▶ … ▶ last chunk
    └──────────────────────── E2E ───────────────────────────┘
    TPOT = (last chunk - first chunk) / (tokens - 1)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    """Whatever else servers send is skipped unread: at 18,000 events a second the client's own time
    would be among what it measures."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    timeline: dict[str, Any] | None = None


_read_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Outcome:
    """Times are `time.perf_counter` seconds. `due`: when it should have been sent."""

    due: float
    sent: float | None = None
    end: float | None = None
    chunks: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    wanted_tokens: int = 0
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    timeline: dict[str, Any] | None = None
    """Tells what tandem says of the request, where it was asked to (`x-tandem-timeline`)."""
    prefill_node: str = ""
    """Names the node that tandem's header does."""

    @property
    def complete(self) -> bool:
        return self.end is not None and bool(self.chunks) and self.error is None

    @property
    def num_tokens(self) -> int:
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        assert self.sent is not None
        return self.chunks[0] - self.sent

    @property
    def e2e_s(self) -> float:
        assert self.sent is not None
        return self.chunks[-1] - self.sent

    @property
    def tpot_s(self) -> float | None:
        if self.num_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.num_tokens - 1)

    @property
    def longest_silence_s(self) -> float:
        return max([self.ttft_s, *self.gaps_s])

    @property
    def gaps_s(self) -> list[float]:
        return [later - one for one, later in zip(self.chunks, self.chunks[1:], strict=False)]


async def stream_completion(
    client: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    outcome: Outcome,
) -> None:
    """Posts `body` and fills `outcome`. Whatever goes wrong is its `error`; only cancelling
    raises."""
    outcome.sent = time.perf_counter()
    try:
        async with client.post(url, data=body, headers=headers) as response:
            outcome.prefill_node = response.headers.get("x-tandem-prefill-node", "")
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {_error_text(await response.text())}"
                return
            await read_events(response, outcome)
        if outcome.error is None:
            outcome.end = time.perf_counter()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:200]


async def completion(
    client: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, object],
    headers: Mapping[str, str],
    wanted_tokens: int = 0,
) -> Outcome:
    """Asks for a completion now, as a stream, and returns what came of it."""
    outcome = Outcome(time.perf_counter(), wanted_tokens=wanted_tokens)
    data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    headers = {"content-type": "application/json", **headers}
    await stream_completion(client, f"{url}/v1/completions", data, headers, outcome)
    return outcome


async def read_events(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Fills `outcome` with what a stream says. Raises as aiohttp does where it breaks off."""
    rest, done = b"", False
    async for part in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.strip()
            if not data.startswith(b"data:"):
                continue
            data = data[5:].strip()
            if data == b"[DONE]":
                done = True
            else:
                _take_event(_read_event(data), now, outcome)
    if not done and outcome.error is None:
        outcome.error = "the stream ended without [DONE]"


def _take_event(event: _Event, now: float, outcome: Outcome) -> None:
    if event.error is not None:
        outcome.error = f"in the stream: {event.error}"[:200]
        return
    if (usage := event.usage) is not None:
        _take_usage(usage, outcome)
    outcome.timeline = event.timeline or outcome.timeline
    for choice in event.choices or ():
        text = choice.text or (choice.delta.content if choice.delta is not None else "") or ""
        if text or choice.token_ids:
            outcome.chunks.append(now)
            outcome.text += text
            outcome.token_ids += choice.token_ids or ()


def _take_usage(usage: _Usage, outcome: Outcome) -> None:
    if usage.completion_tokens is not None:
        outcome.output_tokens = usage.completion_tokens
    if usage.prompt_tokens is not None:
        outcome.prompt_tokens = usage.prompt_tokens
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        outcome.cached_tokens = details.cached_tokens


def _error_text(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200]
