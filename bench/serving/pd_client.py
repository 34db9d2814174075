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

from bench.figures import Figures, distribution_ms
from bench.serving.node_metrics import read_metrics
from bench.serving.openai_stream import Outcome, stream_completion
from bench.serving.pd_cluster import Cluster

STAGES = {
    "queue": "queue_s",
    "prefill": "prefill_s",
    "first token": "first_token_s",
    "first KV byte": "kv_first_byte_s",
    "last KV byte injected": "kv_last_byte_s",
    "second token": "second_token_s",
}
"""Names in results, and in a request's timeline."""
_HEADERS = {"content-type": "application/json", "x-tandem-timeline": "1"}


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

    async def ask(self, max_tokens: int, num_tokens: int | None = None) -> Outcome:
        """Sends a prompt that no cache holds. Raises `SystemExit` for a request that fails."""
        self._number += 1
        length = num_tokens or self._num_tokens
        body = {
            "prompt": [self._token(self._number, i) for i in range(length)],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        outcome = Outcome(due=time.perf_counter())
        url = f"{self._cluster.url}/v1/completions"
        await stream_completion(self._session, url, json.dumps(body).encode(), _HEADERS, outcome)
        if outcome.error is not None:
            raise SystemExit(f"error: {outcome.error}")
        return outcome

    def _token(self, number: int, index: int) -> int:
        low, high = self._vocabulary
        return low + (number * 7919 + index * index * 31) % (high - low)

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
    await client.ask(max_tokens=4)
    timelines: list[dict[str, Any]] = [
        (await client.ask(max_tokens=4)).timeline or {} for _ in range(count)
    ]
    rows = {
        name: [one[key] for one in timelines if one[key] is not None]
        for name, key in STAGES.items()
    }
    rows["last byte after first token"] = [
        one["kv_last_byte_s"] - one["first_token_s"]
        for one in timelines
        if one["kv_last_byte_s"] is not None
    ]
    return {
        "paths": [one["path"] for one in timelines],
        "kv_bytes": [one["kv_bytes"] for one in timelines],
        **{name: distribution_ms(values) for name, values in rows.items()},
    }


async def interference(client: Client, running: int, arrivals: int) -> Figures:
    """Measures the time between tokens of `running` long answers: alone, then while prompts arrive
    whose KV comes over and which then end; and the host time of the steps of both times.
    """
    long_answers = [
        asyncio.create_task(client.ask(max_tokens=1200, num_tokens=64)) for _ in range(running)
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
        await client.ask(max_tokens=2)
    busy = (busy_start, time.perf_counter())
    counted.append(await client.host_time())
    answers = [outcome.chunks for outcome in await asyncio.gather(*long_answers)]
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
