#!/usr/bin/env python3
"""Kills a decode node of a real cluster every few seconds, under streams that must not notice.

    1. a cluster on this machine: prefill nodes, decode nodes, two routers, the demo checkpoint
    2. every request once, undisturbed: its text, usage and end are what it must always give
    3. for `--seconds`: `--streams` requests at a time, over both routers, while one decode node
       after the other gets SIGKILL (every third one SIGSTOP) and is started again
    4. every answer is compared; the longest silence that a client saw is reported

    python -m bench.chaos --seconds 120

Exit code 1 when an answer differs or breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from bench.openai_stream import Outcome, stream_completion
from bench.record import write_result
from cli.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs, free_ports
from cli.supervisor import Listener, Service, ServiceSpec, Supervisor

_DECODE_ARGS = ("--local-prefill-threshold", "8")
_ROUTER_ARGS = ("--stale-after-s", "2", "--down-after-s", "4", "--stream-stall-s", "3")
_NUM_REQUESTS = 40
_FREEZE_S = 6.0

Answer = tuple[str, int | None]
"""Text and number of output tokens."""


def request_body(i: int) -> bytes:
    """Request `i`: always the same."""
    rng = random.Random(i)
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": [10 + i, *(rng.randrange(10, 400) for _ in range(rng.choice([3, 60, 200])))],
        "max_tokens": rng.choice([80, 160, 240]),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": i,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if i % 3 == 1:
        body |= {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    return json.dumps(body).encode()


@dataclass(slots=True)
class Cluster:
    supervisor: Supervisor
    urls: list[str]

    @property
    def decodes(self) -> list[Service]:
        return [s for s in self.supervisor.services if s.spec.name.startswith("decode")]


@dataclass(slots=True)
class Load:
    """Answers under way and done. `expected` [request]."""

    client: aiohttp.ClientSession
    urls: list[str]
    expected: dict[int, Answer] = field(default_factory=dict)
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_gaps_s: list[float] = field(default_factory=list)

    async def ask(self, i: int, url: str) -> Outcome:
        outcome = Outcome(due=time.perf_counter())
        headers = {"content-type": "application/json"}
        await stream_completion(
            self.client, f"{url}/v1/completions", request_body(i), headers, outcome
        )
        return outcome

    async def learn(self) -> None:
        """Raises `SystemExit` when the undisturbed run fails."""
        outcomes = await asyncio.gather(*(self.ask(i, self.urls[0]) for i in range(_NUM_REQUESTS)))
        for i, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise SystemExit(f"request {i} fails without any disturbance: {outcome.error}")
            self.expected[i] = (outcome.text, outcome.output_tokens)

    async def run(self, serials: itertools.count[int], until: float) -> None:
        while time.monotonic() < until:
            serial = next(serials)
            i = serial % _NUM_REQUESTS
            outcome = await self.ask(i, self.urls[serial % len(self.urls)])
            if outcome.error is None and (outcome.text, outcome.output_tokens) == self.expected[i]:
                self.num_right += 1
                self.longest_gaps_s.append(max(outcome.gaps_s, default=0.0))
            else:
                self.wrong.append(outcome.error or f"request {i} has another text")


async def disturb(decodes: list[Service], every_s: float, until: float) -> list[str]:
    """What was done to whom. A node that is still down is left alone."""
    done: list[str] = []
    for number, service in zip(itertools.count(), itertools.cycle(decodes), strict=False):
        await asyncio.sleep(every_s)
        if time.monotonic() >= until:
            return done
        if service.pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            if number % 3 == 2:
                os.kill(service.pid, signal.SIGSTOP)
                await asyncio.sleep(_FREEZE_S)
                os.kill(service.pid, signal.SIGCONT)
                done.append("froze")
            else:
                os.kill(service.pid, signal.SIGKILL)
                done.append("killed")
            print(f"{done[-1]} {service.spec.name}", flush=True)
    return done


def make_cluster(num_prefill: int, num_decode: int) -> Cluster:
    port, second_port = free_ports(2)
    settings = UpSettings(
        model=str(DEMO_CHECKPOINT), prefill=num_prefill, decode=num_decode, device="cpu", port=port
    )
    router, *nodes = cluster_specs(settings, [])
    nodes = [
        replace(node, argv=(*node.argv, *_DECODE_ARGS)) if node.name.startswith("decode") else node
        for node in nodes
    ]
    routers = [_router(router, port, "router-0"), _router(router, second_port, "router-1")]
    supervisor = Supervisor([*routers, *nodes], Listener(), max_pause_s=0.5)
    return Cluster(supervisor, [spec.endpoint for spec in routers])


def _router(spec: ServiceSpec, port: int, name: str) -> ServiceSpec:
    argv = (*spec.argv, "--port", str(port), *_ROUTER_ARGS)
    return replace(spec, name=name, argv=argv, endpoint=f"http://127.0.0.1:{port}")


async def wait_routable(client: aiohttp.ClientSession, cluster: Cluster) -> None:
    for url in cluster.urls:
        async with asyncio.timeout(60):
            while True:
                async with client.get(f"{url}/ready") as response:
                    if (await response.json())["decode_nodes"] == len(cluster.decodes):
                        break
                await asyncio.sleep(0.1)


async def run(args: argparse.Namespace) -> dict[str, object]:
    cluster = make_cluster(args.prefill, args.decode)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    try:
        await cluster.supervisor.start()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            await wait_routable(client, cluster)
            load = Load(client, cluster.urls)
            await load.learn()
            print(f"{_NUM_REQUESTS} requests known; disturbing", flush=True)
            until = time.monotonic() + args.seconds
            serials = itertools.count()
            disturbing = asyncio.create_task(disturb(cluster.decodes, args.every, until))
            await asyncio.gather(*(load.run(serials, until) for _ in range(args.streams)))
            done = await disturbing
    finally:
        await cluster.supervisor.stop()
    gaps = sorted(load.longest_gaps_s)
    return {
        "streams": args.streams,
        "seconds": args.seconds,
        "disturbances": dict(Counter(done)),
        "answers_right": load.num_right,
        "answers_wrong": len(load.wrong),
        "reasons": load.wrong[:10],
        "longest_silence_s": {
            "p50": round(gaps[len(gaps) // 2], 2),
            "p99": round(gaps[len(gaps) * 99 // 100], 2),
            "max": round(gaps[-1], 2),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long it is disturbed")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between disturbances")
    parser.add_argument("--streams", type=int, default=30, help="requests at a time")
    parser.add_argument("--prefill", type=int, default=2, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=3, help="decode nodes")
    parser.add_argument("--name", default="chaos", help="name of the result file")
    args = parser.parse_args()
    figures = asyncio.run(run(args))
    print(json.dumps(figures, indent=1))
    print(f"written: {write_result(args.name, figures).name}")
    return 1 if figures["answers_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
