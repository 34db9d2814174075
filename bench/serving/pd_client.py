"""Single requests to a cluster: the stages of the way of one prompt, and what prompts that arrive
do to answers that run."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.serving.node_metrics import read_metrics
from bench.serving.pd_cluster import Cluster
from bench.serving.report import Figures, distribution_ms

STAGES = (
    "queue",
    "prefill",
    "first token",
    "first KV byte",
    "last KV byte injected",
    "last byte after first token",
    "second token",
)


@dataclass(frozen=True, slots=True)
class HostTime:
    """`seconds` that hosts of workers took to start `steps`."""

    steps: float
    seconds: float

    def us_per_step_since(self, earlier: HostTime) -> float | None:
        """Returns the microseconds of one step; None if there was no step."""
        steps = self.steps - earlier.steps
        return 1e6 * (self.seconds - earlier.seconds) / steps if steps else None


class Client:
    """Sends prompts of `num_tokens` tokens, each different from the first token on."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        cluster: Cluster,
        num_tokens: int,
        vocabulary: tuple[int, int],
    ) -> None:
        self._session = session
        self._cluster = cluster
        self._num_tokens = num_tokens
        self._vocabulary = vocabulary
        self._number = 0

    def body(self, max_tokens: int, num_tokens: int | None = None) -> dict[str, Any]:
        """Makes a body with a prompt that no cache holds."""
        self._number += 1
        length = num_tokens or self._num_tokens
        prompt = [self._token(self._number, i) for i in range(length)]
        return {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def _token(self, number: int, index: int) -> int:
        low, high = self._vocabulary
        return low + (number * 7919 + index * index * 31) % (high - low)

    async def ask(self, body: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        """Returns when each chunk came, and the timeline. Raises `SystemExit` for a refused
        request.
        """
        arrivals: list[float] = []
        timeline: dict[str, Any] = {}
        headers = {"x-tandem-timeline": "1"}
        async with self._session.post(
            f"{self._cluster.url}/v1/completions", json=body, headers=headers
        ) as response:
            if response.status != 200:
                raise SystemExit(f"error: {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                timeline = event.get("timeline") or timeline
                if any(c.get("token_ids") or c.get("text") for c in event.get("choices", ())):
                    arrivals.append(now)
        return arrivals, timeline

    async def host_time(self) -> HostTime:
        """Returns the host time of all decode nodes together, since their start."""
        counted = [await read_metrics(self._session, url) for url in self._cluster.decode_metrics]
        return HostTime(
            sum(metrics["tandem_engine_steps_total"] for metrics in counted),
            sum(metrics["tandem_worker_host_seconds_total"] for metrics in counted),
        )


async def stages(client: Client, count: int) -> Figures:
    """Milliseconds since the decode node had the request, one request at a time; the first, which
    finds nothing that prompts share, is not counted."""
    rows: dict[str, list[float]] = {name: [] for name in STAGES}
    paths: list[str] = []
    num_bytes: list[int] = []
    await client.ask(client.body(max_tokens=4))
    for _ in range(count):
        _, timeline = await client.ask(client.body(max_tokens=4))
        paths.append(timeline["path"])
        num_bytes.append(timeline["kv_bytes"])
        first, last = timeline["first_token_s"], timeline["kv_last_byte_s"]
        found = (
            timeline["queue_s"],
            timeline["prefill_s"],
            first,
            timeline["kv_first_byte_s"],
            last,
            None if last is None else last - first,
            timeline["second_token_s"],
        )
        for name, value in zip(STAGES, found, strict=True):
            if value is not None:
                rows[name].append(value)
    return {
        "paths": paths,
        "kv_bytes": num_bytes,
        **{name: distribution_ms(values) for name, values in rows.items()},
    }


async def interference(client: Client, running: int, arrivals: int) -> Figures:
    """Measures the time between tokens of `running` long answers: alone, then while prompts arrive
    whose KV comes over and which then end; and the host time of the steps of both times.
    """
    long_answers = [
        asyncio.create_task(client.ask(client.body(max_tokens=1200, num_tokens=64)))
        for _ in range(running)
    ]
    await asyncio.sleep(2.0)
    counted = [await client.host_time()]
    quiet = (time.perf_counter(), time.perf_counter() + 2.0)
    await asyncio.sleep(2.0)
    counted.append(await client.host_time())
    busy_start = time.perf_counter()
    for _ in range(arrivals):
        if any(task.done() for task in long_answers):
            break
        await client.ask(client.body(max_tokens=2))
    busy = (busy_start, time.perf_counter())
    counted.append(await client.host_time())
    answers = [chunks for chunks, _ in await asyncio.gather(*long_answers)]
    alone, beside = (distribution_ms(gaps_within(answers, span)) for span in (quiet, busy))
    ratio = beside["p99"] / alone["p99"] if alone and beside else None
    host_us = [later.us_per_step_since(one) for one, later in itertools.pairwise(counted)]
    return {
        "alone": alone,
        "beside transfers": beside,
        "p99 ratio": ratio,
        "host us per step": {"alone": host_us[0], "beside transfers": host_us[1]},
    }


def gaps_within(answers: Sequence[Sequence[float]], span: tuple[float, float]) -> list[float]:
    return [
        later - one
        for chunks in answers
        for one, later in itertools.pairwise(chunks)
        if span[0] <= one and later <= span[1]
    ]
