#!/usr/bin/env python3
"""Kills a decode node of a real cluster every few seconds, under streams that must not notice.

    1. a cluster on this machine: prefill nodes, decode nodes, two routers, the demo checkpoint
    2. every request once, undisturbed: its text, usage and end are what it must always give
    3. for `--seconds`: `--streams` requests at a time, over both routers, while one decode node
       after the other gets SIGKILL (every third one SIGSTOP) and is started again
    4. every answer is compared; the longest silence that its client saw is reported, and what took
       the time: the routers log it of every answer that moves

    python -m bench.serving.chaos --seconds 120

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
import re
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from bench.arguments import parser_of
from bench.figures import distribution
from bench.record import write_result
from bench.serving.openai_stream import Outcome, stream_completion
from cli.local_cluster.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs, free_ports
from cli.local_cluster.supervisor import Listener, Service, ServiceSpec, ServiceState, Supervisor

_DECODE_ARGS = ("--local-prefill-threshold", "8")
_ROUTER_ARGS = ("--stale-after-s", "2", "--down-after-s", "4", "--stream-stall-s", "3")
_NUM_REQUESTS = 40
_FREEZE_S = 6.0
_LONG_S = 1.0
"""Silences above this are explained."""
_MOVED = re.compile(r"request (chaos-\S+) goes on at .*?((?: \w+=[\d.]+){4})")
_LOG_LATE_S = 2.0
_RETRY_S = 1.0

Answer = tuple[str, int | None]
"""Text and number of output tokens."""


def request_body(i: int) -> bytes:
    """Returns the body of request `i`, which is always the same."""
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
    observer: Observer

    @property
    def decodes(self) -> list[Service]:
        return [s for s in self.supervisor.services if s.spec.name.startswith("decode")]


@dataclass(slots=True)
class Silence:
    """The longest one of an answer. `phases`: what it was spent on, if the answer moved then.
    `restarting_s`: of it, while a decode node was starting."""

    seconds: float
    began: float
    request_id: str
    phases: dict[str, float] = field(default_factory=dict)
    restarting_s: float = 0.0


@dataclass(slots=True)
class Observer:
    """Watches what the cluster says of itself meanwhile. Times are `time.perf_counter` seconds."""

    moves: defaultdict[str, list[tuple[float, dict[str, float]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    restarts: dict[str, list[list[float]]] = field(default_factory=dict)

    def on_log(self, service: Service, line: str) -> None:
        if moved := _MOVED.search(line):
            phases = dict(part.split("=") for part in moved[2].split())
            seconds = {phase: float(value) for phase, value in phases.items()}
            self.moves[moved[1]].append((time.perf_counter(), seconds))

    def on_state(self, service: Service) -> None:
        spans = self.restarts.setdefault(service.spec.name, [])
        if service.state is ServiceState.RESTARTING:
            spans.append([time.perf_counter(), float("inf")])
        elif service.state is ServiceState.READY and spans:
            spans[-1][1] = time.perf_counter()

    def start_s(self) -> float:
        """Returns the mean seconds that decode nodes took to come back, of those that were started
        again.
        """
        spans = [stop - start for spans in self.restarts.values() for start, stop in spans]
        done = [span for span in spans if span < float("inf")]
        return round(statistics.fmean(done), 1) if done else 0.0

    def explain(self, silence: Silence) -> None:
        end = silence.began + silence.seconds
        for at, phases in self.moves[silence.request_id]:
            if silence.began < at < end + _LOG_LATE_S:
                silence.phases = phases
        silence.restarting_s = max(
            (
                min(stop, end) - max(start, silence.began)
                for spans in self.restarts.values()
                for start, stop in spans
                if start < end and stop > silence.began
            ),
            default=0.0,
        )


@dataclass(slots=True)
class Load:
    """Answers under way and done. `expected` [request]."""

    client: aiohttp.ClientSession
    urls: list[str]
    expected: dict[int, Answer] = field(default_factory=dict)
    num_right: int = 0
    num_refused: int = 0
    """Requests ended by a clear 503, before anything was answered: no decode node lived."""
    wrong: list[str] = field(default_factory=list)
    silences: list[Silence] = field(default_factory=list)

    async def ask(self, i: int, url: str, request_id: str = "") -> Outcome:
        outcome = Outcome(due=time.perf_counter())
        headers = {"content-type": "application/json"}
        if request_id:
            headers["x-request-id"] = request_id
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
            name = f"chaos-{serial}"
            outcome = await self.ask(i, self.urls[serial % len(self.urls)], name)
            if outcome.error is None and (outcome.text, outcome.output_tokens) == self.expected[i]:
                self.num_right += 1
                seconds, began = max(zip(outcome.gaps_s, outcome.chunks, strict=False))
                self.silences.append(Silence(seconds, began, name))
            elif outcome.error is not None and outcome.error.startswith("HTTP 503"):
                self.num_refused += 1
                await asyncio.sleep(_RETRY_S)
            else:
                self.wrong.append(outcome.error or f"request {i} has another text")


async def disturb(decodes: list[Service], every_s: float, until: float) -> list[str]:
    """Disturbs the cluster; returns what was done to whom. A node that is still down is
    left alone.
    """
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
    observer = Observer()
    listener = Listener(on_log=observer.on_log, on_state=observer.on_state)
    supervisor = Supervisor([*routers, *nodes], listener, max_pause_s=0.5)
    return Cluster(supervisor, [spec.endpoint for spec in routers], observer)


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
    for silence in load.silences:
        cluster.observer.explain(silence)
    return {
        "streams": args.streams,
        "seconds": args.seconds,
        "disturbances": dict(Counter(done)),
        "answers_right": load.num_right,
        "answers_wrong": len(load.wrong),
        "refused_with_503": load.num_refused,
        "node_start_s": cluster.observer.start_s(),
        "reasons": load.wrong[:10],
        "longest_silence_s": distribution([s.seconds for s in load.silences]),
        "of_answers_that_moved_s": distribution([s.seconds for s in load.silences if s.phases]),
        "of_the_others_s": distribution([s.seconds for s in load.silences if not s.phases]),
        "long_silences": breakdown([s for s in load.silences if s.seconds > _LONG_S]),
    }


def breakdown(silences: list[Silence]) -> dict[str, object]:
    """Returns the mean seconds of each phase, and the same of the worst tenth."""
    worst = sorted(silences, key=lambda s: -s.seconds)
    return {
        "count": len(silences),
        "moved": sum(bool(s.phases) for s in silences),
        "mean_s": _means(worst),
        "worst_tenth_mean_s": _means(worst[: max(1, len(worst) // 10)]),
    }


def _means(silences: list[Silence]) -> dict[str, float]:
    if not silences:
        return {}
    phases = sorted({phase for s in silences for phase in s.phases})
    means = {"silent": statistics.fmean(s.seconds for s in silences)}
    for phase in phases:
        means[phase] = statistics.fmean(s.phases.get(phase, 0.0) for s in silences)
    means["not moved"] = statistics.fmean(0.0 if s.phases else s.seconds for s in silences)
    means["while a node started"] = statistics.fmean(s.restarting_s for s in silences)
    return {name: round(seconds, 2) for name, seconds in means.items()}


def main() -> int:
    parser = parser_of(__doc__)
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
