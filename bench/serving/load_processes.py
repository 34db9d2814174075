"""One open-loop load, sent by several processes: at 18,000 tokens a second a client in one process
would be slower than what it measures.

    1. `LoadProcesses(n)` starts them
    2. `run`: each makes its share of the prompts, all wait for the last, and send from the same
       moment on; arrivals are those of one client with the same seed
    3. `lateness` says how late their event loops were meanwhile
    4. `close`
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections import Counter
from multiprocessing.connection import Connection

import aiohttp
import uvloop

from bench.serving.load import Load, LoadSpec
from bench.serving.openai_stream import Outcome
from bench.serving.report import Span
from edge.http.loop_lateness import LoopLateness

_BEGIN_S = 0.2
"""Seconds until all processes know when to begin."""
_TICK_S = 0.002


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
