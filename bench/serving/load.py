"""One open-loop load: prompts of random token ids, which arrive as a Poisson process however slow
the answers are. Definitions of all times: `bench.serving.openai_stream`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.serving.openai_stream import Outcome, stream_completion
from bench.serving.report import Span
from bench.workload import Preset, Session, exactly, sessions

_PATH = "/v1/completions"
_UNFINISHED = "not finished within the drain time"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """Requests that are all alike, `rate` a second for `duration_s`, to the URLs in turn; what is
    not answered `drain_s` later is given up.

    Attributes:
        vocabulary: Half-open range of the token ids to draw from.
        extra: Merged into every body.
    """

    urls: list[str]
    model: str
    n_in: int
    n_out: int
    rate: float
    duration_s: float
    drain_s: float
    seed: int
    vocabulary: tuple[int, int]
    extra: dict[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def sessions(self) -> Sequence[Session]:
        """Returns when requests come, in order."""
        limits = exactly(self.n_in), exactly(self.n_out)
        preset = Preset(description="", first=limits[0], output=limits[1], max_prompt=1 << 40)
        return list(sessions(preset, self.rate, self.duration_s, self.seed))

    def body(self, session: Session) -> bytes:
        """Returns the body of a request, which no other load has."""
        rng = random.Random(f"{self.seed} {session.session_id}")
        fields = {
            "model": self.model,
            "prompt": [rng.randrange(*self.vocabulary) for _ in range(self.n_in)],
            "max_tokens": self.n_out,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps({**fields, **self.extra}).encode()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s`: since the load began."""

    at_s: float
    url: str
    body: bytes


class Load:
    """Sends a load, or one client's share of it, and keeps every outcome."""

    def __init__(self, client: aiohttp.ClientSession, spec: LoadSpec) -> None:
        self._client = client
        self._spec = spec
        self.outcomes: list[Outcome] = []

    def arrivals(self, share: int = 0, num_shares: int = 1) -> list[Arrival]:
        """Makes the requests before the clock starts: of several clients that send the load
        together, each has a share."""
        spec = self._spec
        every = zip(spec.sessions(), itertools.cycle(spec.urls), strict=False)
        return [
            Arrival(session.start_s, url, spec.body(session))
            for session, url in itertools.islice(every, share, None, num_shares)
        ]

    async def send(self, arrivals: Sequence[Arrival], start: float) -> Span:
        """Sends each when it is due, counted from `start`, and waits for the answers."""
        tasks = []
        for arrival in arrivals:
            due = start + arrival.at_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask(arrival, due)))
        last_arrival = time.perf_counter()
        await self._drain(tasks, max(last_arrival, start + self._spec.duration_s))
        return Span(start, last_arrival, time.perf_counter())

    async def _ask(self, arrival: Arrival, due: float) -> None:
        headers = {"content-type": "application/json", **self._spec.headers}
        outcome = Outcome(due, wanted_tokens=self._spec.n_out)
        self.outcomes.append(outcome)
        await stream_completion(self._client, arrival.url + _PATH, arrival.body, headers, outcome)

    async def _drain(self, tasks: list[asyncio.Task[None]], since: float) -> None:
        if not tasks:
            return
        left_s = max(0.0, since + self._spec.drain_s - time.perf_counter())
        _, pending = await asyncio.wait(tasks, timeout=left_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in self.outcomes:
            if outcome.sent is not None and outcome.end is None and outcome.error is None:
                outcome.error = _UNFINISHED


async def first_model(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url + "/v1/models") as response:
        if response.status != 200:
            raise SystemExit(f"error: {url}/v1/models answered {response.status}; give --model")
        return str((await response.json())["data"][0]["id"])
