#!/usr/bin/env python3
"""A cluster under load that is hurt on purpose, until every counter must be zero again.

    python -m bench.soak                                       10 000 requests, the demo checkpoint
    python -m bench.soak --requests 300 --kill-every-s 5       a short look

Requests of random lengths come from --clients clients; one in five is left at a random moment. A
transfer process, in turn of prefill and decode, is killed every --kill-every-s. Requests that were
not left are asked again when the cluster is too busy, and must end in full, with the tokens that
their prompt had the first time. At the end nothing may be held: no block, row, lease, staged byte,
pull or open request on any node. Writes bench/results/NAME.json; the exit status says whether all
of it was so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from bench.record import write_result
from cli.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs
from cli.supervisor import Listener, Supervisor
from cli.up import wait_routable

_LEFT_PART = 0.2
_NUM_PROMPTS = 40
_SETTLE_S = 60.0
_ASK_AGAIN = (429, 503)
_ASK_AGAIN_S = 0.5
_ZERO_AT_THE_END = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "tandem_requests_waiting_for_remote_kvs",
    "tandem_delayed_frees",
    "tandem_kv_transfer_live_transfers",
    "tandem_kv_transfer_process_transfers",
    "tandem_kv_transfer_staged_bytes",
    "tandem_kv_transfer_leases",
    "tandem_kv_transfer_open_pulls",
    "tandem_open_requests",
    "tandem_open_prefills",
    "tandem_remote_prefills",
)


class Soak:
    """One run against one cluster."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        self._texts: dict[int, str] = {}
        self.outcomes: Counter[str] = Counter()
        self.asked_to_wait = 0
        """Answers that the cluster is too busy: asked again a little later."""
        self.kills = 0

    async def run(self, num_requests: int, num_clients: int) -> None:
        numbers = iter(range(num_requests))
        await asyncio.gather(*(self._client(numbers) for _ in range(num_clients)))

    async def _client(self, numbers: Iterator[int]) -> None:
        for _ in numbers:
            is_left = self._random.random() < _LEFT_PART
            prompt = self._random.randrange(_NUM_PROMPTS)
            try:
                async with asyncio.timeout(self._random.random() if is_left else 300.0):
                    self.outcomes[await self._ask(prompt)] += 1
            except TimeoutError:
                self.outcomes["left" if is_left else "stuck"] += 1
            except aiohttp.ClientError as error:
                self.outcomes[f"failed: {type(error).__name__}"] += 1

    async def _ask(self, prompt: int) -> str:
        body = {
            "prompt": [(7 * i + prompt) % 400 + 10 for i in range(3 + 9 * prompt)],
            "max_tokens": 4 + prompt,
            "temperature": 0.7 * (prompt % 2),
            "seed": prompt,
            "ignore_eos": True,
        }
        while True:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                answer: dict[str, Any] = await response.json()
            if response.status not in _ASK_AGAIN:
                break
            self.asked_to_wait += 1
            await asyncio.sleep(_ASK_AGAIN_S)
        if response.status != 200:
            return f"status {response.status}: {answer['error']['message'][:120]}"
        text = answer["choices"][0]["text"]
        known = self._texts.setdefault(prompt, text)
        return "complete" if text == known else "other tokens than before"

    async def kill_forever(self, roots: list[int], every_s: float) -> None:
        """Transfer processes below `roots`, in turn."""
        while True:
            await asyncio.sleep(every_s)
            victims = transfer_processes(roots[self.kills % len(roots)])
            if victims:
                os.kill(self._random.choice(victims), signal.SIGKILL)
                self.kills += 1


def transfer_processes(root: int) -> list[int]:
    """Below this process, however deep."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, left = [], [root]
    while left:
        left += children.get(pid := left.pop(), [])
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"kv_transfer.process" in command:
            found.append(pid)
    return found


async def held(session: aiohttp.ClientSession, urls: list[str]) -> dict[str, float]:
    """What is not zero, or not free, by node and name."""
    found: dict[str, float] = {}
    for url in urls:
        values: Counter[str] = Counter()
        async with session.get(url) as response:
            for line in (await response.text()).splitlines():
                if match := re.match(r"^([a-zA-Z_:]+)(?:\{.*\})? (\S+)$", line):
                    values[match[1]] += float(match[2])  # type: ignore[assignment]
        blocks = values["tandem_kv_blocks_total"] - values["tandem_kv_blocks_free"]
        found |= {f"{url} {name}": values[name] for name in _ZERO_AT_THE_END if values[name]}
        found |= {f"{url} blocks": blocks} if blocks else {}
    return found


async def until_nothing_is_held(
    session: aiohttp.ClientSession, urls: list[str]
) -> tuple[float, dict[str, float]]:
    """(Seconds that it took, what is left after the last of them)."""
    started = time.monotonic()
    while True:
        left = await held(session, urls)
        elapsed = time.monotonic() - started
        if not left or elapsed > _SETTLE_S:
            return round(elapsed, 2), left
        await asyncio.sleep(0.2)


def metrics_urls(supervisor: Supervisor) -> list[str]:
    urls = []
    for service in supervisor.services[1:]:
        argv = service.spec.argv
        name = "--metrics-port" if "--metrics-port" in argv else "--port"
        urls.append(f"http://127.0.0.1:{argv[argv.index(name) + 1]}/metrics")
    return urls


async def run(args: argparse.Namespace) -> dict[str, Any]:
    settings = UpSettings(
        model=args.model or str(DEMO_CHECKPOINT),
        prefill=args.prefill,
        decode=args.decode,
        device=args.device,
        port=0,
        _cli_parse_args=[],
    )
    node_args = ["--kv-transport", args.kv_transport, "--no-enable-prefix-caching"]
    supervisor = Supervisor(cluster_specs(settings, node_args), Listener())
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        await supervisor.start()
        url = supervisor.services[0].spec.endpoint
        await wait_routable(url, settings)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            soak = Soak(session, url, args.seed)
            roots = [service.pid for service in supervisor.services[1:] if service.pid]
            killer = asyncio.create_task(soak.kill_forever(roots, args.kill_every_s))
            started = time.monotonic()
            await soak.run(args.requests, args.clients)
            seconds = time.monotonic() - started
            killer.cancel()
            settled_s, left = await until_nothing_is_held(session, metrics_urls(supervisor))
        return {
            "outcomes": dict(soak.outcomes),
            "asked_to_wait": soak.asked_to_wait,
            "kills": soak.kills,
            "seconds": round(seconds, 1),
            "settled_s": settled_s,
            "left": left,
        }
    finally:
        await supervisor.stop()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the demo checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--kv-transport", choices=("auto", "grpc", "cuda_ipc"), default="auto")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-every-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="soak", help="of the result file; empty: none")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    figures = asyncio.run(run(args))
    print(json.dumps(figures, indent=1))
    if args.name:
        print("written:", write_result(args.name, {"settings": vars(args), **figures}))
    is_good = not figures["left"] and set(figures["outcomes"]) <= {"complete", "left"}
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
