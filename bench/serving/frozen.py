#!/usr/bin/env python3
"""Freezes one process of a decode node, and measures how long its clients hear nothing.

    1. a cluster on this machine: prefill nodes, decode nodes, a router, the demo checkpoint, all
       settings as they come
    2. every request once, undisturbed: its text, usage and end are what it must always give
    3. for each kind of process, `--rounds` times: half of the requests; once all of these have
       begun to answer, the process gets SIGSTOP, and sleeps until all answers are there; the
       other half is sent right behind the signal, with prompts that no node has in its cache
    4. every answer is compared; the longest silence that a client saw is reported, from the
       sending of a request on

    python -m bench.serving.frozen

Exit code 1 when an answer differs or breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from bench.record import write_result
from bench.serving.chaos import request_body
from bench.serving.openai_stream import Outcome, stream_completion
from bench.serving.process_tree import below, module_of
from cli.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs, free_ports
from cli.supervisor import Listener, Service, Supervisor

_PROCESSES = {
    "engine core": "engine.core.core_proc",
    "worker": "engine.executor.worker_proc",
    "transfer process": "kv_transfer.control.process",
}
_LONGEST_S = 60.0
"""The process wakes after this, whatever is still missing."""


def silences(outcome: Outcome) -> Iterator[float]:
    """Yields the seconds before each chunk, the first one counted from the sending, and before the
    end."""
    assert outcome.sent is not None, "it was sent"
    before = outcome.sent
    for at in (*outcome.chunks, outcome.end or 0.0):
        yield max(0.0, at - before)
        before = at


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stops a process. One that was killed meanwhile has no successor under its id so soon."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Round:
    """Holds what one freeze did: the longest silence of each answer, whether all came while the
    process was frozen, and how many were right."""

    longest_s: list[float]
    all_came: bool
    num_right: int


def summary(rounds: list[Round]) -> dict[str, object]:
    longest = sorted(seconds for one in rounds for seconds in one.longest_s)
    return {
        "longest_silence_s": round(longest[-1], 2),
        "median_of_answers_s": round(longest[len(longest) // 2], 2),
        "all_answered_while_frozen": all(one.all_came for one in rounds),
        "answers": len(longest),
        "answers_wrong": len(longest) - sum(one.num_right for one in rounds),
    }


class Bench:
    """One cluster, and what its requests must give."""

    def __init__(self, args: argparse.Namespace) -> None:
        (port,) = free_ports(1)
        self._num_streams: int = args.streams
        settings = UpSettings(
            model=str(DEMO_CHECKPOINT),
            prefill=args.prefill,
            decode=args.decode,
            device="cpu",
            port=port,
        )
        specs = cluster_specs(settings, [])
        self.url = specs[0].endpoint
        self.supervisor = Supervisor(specs, Listener())
        self._expected: list[tuple[str, int | None]] = []
        self._num_calls = 0

    @property
    def decodes(self) -> list[Service]:
        return [s for s in self.supervisor.services if s.spec.name.startswith("decode")]

    async def until_whole(self, client: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(120):
            while True:
                async with client.get(f"{self.url}/ready") as response:
                    if (await response.json())["decode_nodes"] == len(self.decodes):
                        return
                await asyncio.sleep(0.1)

    async def learn(self, client: aiohttp.ClientSession) -> float:
        """Returns the longest silence without any disturbance. Raises SystemExit when one fails."""
        outcomes = [Outcome(due=0.0) for _ in range(self._num_streams)]
        await self._ask(client, outcomes, 0)
        for i, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise SystemExit(f"request {i} fails without any disturbance: {outcome.error}")
        self._expected = [(outcome.text, outcome.output_tokens) for outcome in outcomes]
        return max(max(silences(outcome)) for outcome in outcomes)

    async def freeze(self, client: aiohttp.ClientSession, module: str) -> Round:
        """Freezes one process of the first decode node."""
        root = self.decodes[0].pid
        assert root is not None, "the node is up"
        pid = next(pid for pid in below(root) if module_of(pid) == module)
        outcomes = [Outcome(due=0.0) for _ in range(self._num_streams)]
        half = self._num_streams // 2
        early = asyncio.create_task(self._ask(client, outcomes[:half], 0))
        async with asyncio.timeout(_LONGEST_S):
            while not all(outcome.chunks or outcome.error for outcome in outcomes[:half]):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with frozen(pid):
            late = asyncio.create_task(self._ask(client, outcomes[half:], half))
            done, _ = await asyncio.wait([early, late], timeout=_LONGEST_S)
        await asyncio.gather(early, late)
        return Round(
            [max(silences(outcome), default=0.0) for outcome in outcomes],
            len(done) == 2,
            sum(
                outcome.error is None and (outcome.text, outcome.output_tokens) == expected
                for outcome, expected in zip(outcomes, self._expected, strict=True)
            ),
        )

    async def _ask(
        self, client: aiohttp.ClientSession, outcomes: list[Outcome], first: int
    ) -> None:
        """Sends requests `first` and up. No two calls share cached prompts."""
        url, headers = f"{self.url}/v1/completions", {"content-type": "application/json"}
        self._num_calls += 1
        bodies = [
            json.dumps({**json.loads(request_body(i)), "cache_salt": str(self._num_calls)}).encode()
            for i in range(first, first + len(outcomes))
        ]
        await asyncio.gather(
            *(
                stream_completion(client, url, body, headers, outcome)
                for body, outcome in zip(bodies, outcomes, strict=True)
            )
        )


async def run(args: argparse.Namespace) -> dict[str, object]:
    bench = Bench(args)
    figures: dict[str, object] = {
        "prefill_nodes": args.prefill,
        "decode_nodes": args.decode,
        "streams": args.streams,
        "rounds": args.rounds,
    }
    cases: dict[str, dict[str, object]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    try:
        await bench.supervisor.start()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            await bench.until_whole(client)
            figures["longest_silence_undisturbed_s"] = round(await bench.learn(client), 2)
            for name, module in _PROCESSES.items():
                rounds = []
                for _ in range(args.rounds):
                    await bench.until_whole(client)
                    rounds.append(await bench.freeze(client, module))
                cases[name] = summary(rounds)
                print(f"{name} frozen: {cases[name]}", flush=True)
    finally:
        await bench.supervisor.stop()
    return {**figures, "frozen": cases}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=12, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="times for each kind of process")
    parser.add_argument("--prefill", type=int, default=1, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=2, help="decode nodes")
    parser.add_argument("--name", default="frozen", help="name of the result file")
    args = parser.parse_args()
    figures = asyncio.run(run(args))
    print(json.dumps(figures, indent=1))
    print(f"written: {write_result(args.name, figures).name}")
    cases = figures["frozen"]
    assert isinstance(cases, dict)
    return 1 if any(case["answers_wrong"] for case in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
