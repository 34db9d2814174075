"""One open-loop load: prompts of random token ids, which arrive as a Poisson process however slow
the answers are. Definitions of all times: `bench.serving.openai_stream`.

At 18,000 tokens a second a client in one process would be slower than what it measures, so several
send it together:

    1. `LoadProcesses(n)` starts them
    2. `run`: each makes its share of the prompts, all wait for the last, and send from the same
       moment on; arrivals are those of one client with the same seed
    3. `lateness` says how late their event loops were meanwhile
    4. `close`
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import uvloop

from bench.serving.figures.report import Span
from bench.serving.openai_stream import Outcome, stream_completion
from bench.workload import Preset, Session, exactly, sessions
from edge.http.event_loop.loop_lateness import LoopLateness

_PATH = "/v1/completions"
_UNFINISHED = "not finished within the drain time"
_BEGIN_S = 0.2
"""Seconds until all processes know when to begin."""
_TICK_S = 0.002


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


class LoadProcesses:
    """Holds `count` processes that send."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.lateness: Counter[str] = Counter()
        """Counts ticks of all event loops in the last run, in the buckets of `LoopLateness`."""
        self._ends: list[Connection] = []
        self._processes = []
        for share in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_send_share, args=(theirs, share, count), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    async def run(self, spec: LoadSpec) -> tuple[list[Outcome], Span]:
        """Returns all outcomes in order of arrival. Raises EOFError when a process has ended."""
        for end in self._ends:
            end.send(spec)
        for end in self._ends:
            await asyncio.to_thread(end.recv)
        start = time.perf_counter() + _BEGIN_S
        for end in self._ends:
            end.send(start)
        found = [await asyncio.to_thread(end.recv) for end in self._ends]
        outcomes = sorted((one for part, _, _ in found for one in part), key=lambda one: one.due)
        spans = [span for _, span, _ in found]
        self.lateness = sum((Counter(buckets) for _, _, buckets in found), Counter())
        last_arrival = max(span.last_arrival for span in spans)
        return outcomes, Span(start, last_arrival, max(span.end for span in spans))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()


def _send_share(connection: Connection, share: int, num_shares: int) -> None:
    gc.disable()
    uvloop.run(_serve(connection, share, num_shares))


async def _serve(connection: Connection, share: int, num_shares: int) -> None:
    while True:
        try:
            spec: LoadSpec = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=1 << 18
        ) as client:
            load = Load(client, spec)
            arrivals = load.arrivals(share, num_shares)
            connection.send("ready")
            start: float = await asyncio.to_thread(connection.recv)
            lateness = LoopLateness(_TICK_S)
            with lateness.watch():
                span = await load.send(arrivals, start)
        gc.collect()
        for outcome in load.outcomes:
            outcome.text, outcome.token_ids = "", []
        connection.send((load.outcomes, span, lateness.cumulative()))


async def first_model(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url + "/v1/models") as response:
        if response.status != 200:
            raise SystemExit(f"error: {url}/v1/models answered {response.status}; give --model")
        return str((await response.json())["data"][0]["id"])
