#!/usr/bin/env python3
"""Measures how long a client that leaves is remembered, by where its request was.

    python -m bench.serving.abort_points            20 rounds of every point, the demo checkpoint

A router, a prefill and a decode node. For each point of a request's way its processes are held
(SIGSTOP) until the request is there; then the client closes its connection, the processes go on,
and what counts is the time until nothing is held on either node any more: no block, row, lease,
staged byte, pull or open request. Leases and timeouts take an hour, so none of them can have freed
anything. Nodes report every tenth of a second, which is part of the times. Writes
bench/results/NAME.json; the exit status says whether all of it took less than --limit-s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import aiohttp

from bench.record import write_result
from bench.serving.node_metrics import read_metrics
from bench.serving.process_tree import below, module_of
from bench.serving.soak import all_held, metrics_url
from cli.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs
from cli.supervisor import Listener, Service, Supervisor
from cli.up import wait_routable

_NODE_ARGS = [
    "--no-enable-prefix-caching",
    *("--block-size", "16"),
    *("--num-blocks", "24"),
    *("--max-model-len", "384"),
    *("--max-num-batched-tokens", "64"),
    *("--kv-lease-s", "3600"),
    *("--kv-stall-timeout-s", "3600"),
]
_POLL_S = 0.01
_REPORT_S = 0.15
_STEADY_S = 0.3
_MOST_TRIES = 10
_PATIENCE_S = 60.0
_SENTENCE = "Once upon a time there was a little dog who lived in the village with a cat. "
"""A prompt of 21 tokens."""


class PassedBy(Exception):
    """The request was quicker than we were: once more."""


class Client:
    """One streamed request. `leave` closes its connection."""

    def __init__(self, session: aiohttp.ClientSession, url: str, **body: Any) -> None:
        self.num_events = 0
        self._task = asyncio.create_task(self._read(session, url, body))

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until_events(self, count: int) -> None:
        """Raises `PassedBy` when there are fewer, and `aiohttp.ClientError`."""
        while self.num_events < count:
            self.check_goes_on()
            await asyncio.sleep(0.001)

    def check_goes_on(self) -> None:
        """Raises `PassedBy`, and `aiohttp.ClientError`."""
        if self._task.done():
            self._task.result()
            raise PassedBy

    async def _read(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                self.num_events += line.startswith(b"data: {")


class Stage:
    """A cluster, the clients of one round, and the processes that are held meanwhile."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, decode: Service, prefill: Service
    ) -> None:
        self.session = session
        self.url = url
        self.decode = decode
        self.prefill = prefill
        self.clients: list[Client] = []

    def ask(self, num_sentences: int, max_tokens: int = 8) -> Client:
        body = {
            "prompt": _SENTENCE * num_sentences,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        client = Client(self.session, self.url, **body)
        self.clients.append(client)
        return client

    def processes(self, service: Service, module: str) -> list[int]:
        assert service.pid is not None
        found = [pid for pid in below(service.pid) if module_of(pid) == module]
        assert found, f"{service.spec.name} has no process {module}"
        return found

    @contextmanager
    def held(self, service: Service, module: str) -> Iterator[list[int]]:
        pids = self.processes(service, module)
        _signal(pids, signal.SIGSTOP)
        try:
            yield pids
        finally:
            _signal(pids, signal.SIGCONT)

    async def value(self, service: Service, name: str) -> float:
        return (await read_metrics(self.session, metrics_url(service))).get(name, 0.0)

    async def until(self, service: Service, name: str, is_met: Callable[[float], bool]) -> None:
        """Raises RuntimeError when it does not come true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not is_met(await self.value(service, name)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{service.spec.name}: {name} is still not as it should be")
            await asyncio.sleep(_POLL_S)

    async def until_empty(self) -> float:
        """Returns when nothing was left, on CLOCK_MONOTONIC, and stayed so: reports may come a
        little late.
        """
        deadline = time.monotonic() + _PATIENCE_S
        empty_since = 0.0
        while True:
            looked_at = time.monotonic()
            left = await all_held(self.session, [self.decode, self.prefill])
            if left:
                empty_since = 0.0
            elif not empty_since:
                empty_since = time.monotonic()
            elif looked_at - empty_since > _STEADY_S:
                return empty_since
            if looked_at > deadline:
                raise RuntimeError(f"still held: {left}")
            await asyncio.sleep(_POLL_S)

    async def leave(self) -> None:
        clients, self.clients = self.clients, []
        await asyncio.gather(*(client.leave() for client in clients))


_WORKER = "engine.executor.worker_proc"
_TRANSFER = "kv_transfer.control.process"
_PREFILL = "prefill_node"
_MOVED = "tandem_kv_transfer_bytes_moved"


async def before_accept(stage: Stage, holds: ExitStack) -> None:
    holds.enter_context(stage.held(stage.prefill, _PREFILL))
    stage.ask(5)
    await stage.until(stage.decode, "tandem_remote_prefills", lambda n: n > 0)


async def queued_on_prefill(stage: Stage, holds: ExitStack) -> None:
    holds.enter_context(stage.held(stage.prefill, _WORKER))
    for _ in range(4):
        stage.ask(2)
    await stage.until(stage.prefill, "vllm:num_requests_waiting", lambda n: n > 0)


async def mid_prefill(stage: Stage, holds: ExitStack) -> None:
    holds.enter_context(stage.held(stage.prefill, _WORKER))
    stage.ask(12)
    await stage.until(stage.prefill, "vllm:num_requests_running", lambda n: n > 0)


async def mid_transfer(stage: Stage, holds: ExitStack) -> None:
    """Waits, as the worker goes on for moments, until KV of the prompt's first part has moved."""
    moved = await stage.value(stage.decode, _MOVED)
    workers = holds.enter_context(stage.held(stage.prefill, _WORKER))
    client = stage.ask(12)
    await stage.until(stage.prefill, "vllm:num_requests_running", lambda n: n > 0)
    while await stage.value(stage.decode, _MOVED) == moved:
        _signal(workers, signal.SIGCONT)
        await asyncio.sleep(0.002)
        _signal(workers, signal.SIGSTOP)
        await asyncio.sleep(_REPORT_S)
    if client.num_events:
        raise PassedBy


async def kv_without_token(stage: Stage, holds: ExitStack) -> None:
    with stage.held(stage.prefill, _WORKER):
        stage.ask(5)
        await stage.until(stage.prefill, "vllm:num_requests_running", lambda n: n > 0)
        holds.enter_context(stage.held(stage.prefill, _PREFILL))
    await stage.until(stage.decode, "tandem_kv_transfer_live_transfers", lambda n: n == 0)
    if not await stage.value(stage.decode, "tandem_requests_waiting_for_remote_kvs"):
        raise PassedBy


async def token_without_kv(stage: Stage, holds: ExitStack) -> None:
    holds.enter_context(stage.held(stage.prefill, _TRANSFER))
    await stage.ask(5).until_events(1)
    await stage.until(stage.decode, "tandem_requests_waiting_for_remote_kvs", lambda n: n > 0)


async def joined(stage: Stage, holds: ExitStack) -> None:
    name = "vllm:external_prefix_cache_hits_total"
    before = await stage.value(stage.decode, name)
    client = stage.ask(5, max_tokens=250)
    await client.until_events(3)
    await stage.until(stage.decode, name, lambda n: n > before)
    client.check_goes_on()


async def being_preempted(stage: Stage, holds: ExitStack) -> None:
    before = await stage.value(stage.decode, "vllm:num_preemptions_total")
    for _ in range(5):
        stage.ask(1, max_tokens=300)
    await stage.until(stage.decode, "vllm:num_preemptions_total", lambda n: n > before)


Point = Callable[[Stage, ExitStack], Awaitable[None]]
POINTS: dict[str, Point] = {
    "before the prefill node has accepted": before_accept,
    "queued on the prefill node": queued_on_prefill,
    "in the middle of the prompt": mid_prefill,
    "in the middle of the transfer": mid_transfer,
    "KV complete, first token missing": kv_without_token,
    "first token sent, KV incomplete": token_without_kv,
    "joined": joined,
    "while requests are preempted": being_preempted,
}


async def seconds_to_empty(stage: Stage, point: Point) -> float:
    """Returns the seconds from the client's leaving until nothing is left. Raises `PassedBy`, and
    leaves nothing behind then either.
    """
    with ExitStack() as holds:
        try:
            await point(stage, holds)
        finally:
            left_at = time.monotonic()
            await stage.leave()
            holds.close()
            empty_at = await stage.until_empty()
    return empty_at - left_at


async def measure(stage: Stage, rounds: int) -> dict[str, dict[str, float]]:
    """Measures by point."""
    found = {}
    for name, point in POINTS.items():
        times: list[float] = []
        for _ in range(_MOST_TRIES * rounds):
            with suppress(PassedBy):
                times.append(await seconds_to_empty(stage, point))
            if len(times) == rounds:
                break
        else:
            raise RuntimeError(f"{name}: requests are always quicker than we are")
        found[name] = {
            "rounds": rounds,
            "p50_s": round(statistics.median(times), 3),
            "max_s": round(max(times), 3),
        }
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


async def run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    settings = UpSettings(
        model=str(DEMO_CHECKPOINT), prefill=1, decode=1, device=args.device, port=0,
        _cli_parse_args=[],
    )  # fmt: skip
    specs = cluster_specs(settings, _NODE_ARGS)
    supervisor = Supervisor(specs, Listener())
    try:
        await supervisor.start()
        await wait_routable(specs[0].endpoint, settings)
        async with aiohttp.ClientSession() as session:
            _, decode, prefill = supervisor.services
            stage = Stage(session, specs[0].endpoint, decode, prefill)
            await stage.ask(5).until_events(1)
            await stage.leave()
            return await measure(stage, args.rounds)
    finally:
        await supervisor.stop()


def _signal(pids: list[int], signum: int) -> None:
    for pid in pids:
        os.kill(pid, signum)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=2.0)
    parser.add_argument("--name", default="abort_points", help="of the result file; empty: none")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    figures = asyncio.run(run(args))
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if args.name:
        print("written:", write_result(args.name, {"settings": vars(args), "points": figures}))
    return 0 if all(point["max_s"] < args.limit_s for point in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
