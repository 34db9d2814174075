#!/usr/bin/env python3
"""Measures what it costs a router to keep a response: what comes before the node's answer and what
comes behind it, without HTTP and without the answer.

Each response goes on from the one before it, so its history is read, up to a chain of `--turns`.
"At once" has this many conversations that each ask for one after the other. In rows that are `busy`
the event loop works half of the time, as that of a router does that relays streams.

    python -m bench.router.response_store
    python -m bench.router.response_store --url postgresql://USER@HOST/DATABASE
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time

import uvloop

from bench.record import write_result
from router.responses.kept_responses import KeptResponses
from router.responses.settings import KeepLimits
from router.responses.state_fields import read_state
from router.store.database import Database

_BUSY_S = 0.001
_WORDS = "what somebody says of a place and its weather, at some length. " * 12


async def _keep(kept: KeptResponses, previous: str) -> str:
    """Keeps one response, and returns its id."""
    item = {"type": "message", "role": "user", "content": _WORDS}
    asked: dict[str, object] = {"model": "demo", "input": [item]}
    if previous:
        asked["previous_response_id"] = previous
    state = read_state(json.dumps(asked).encode())
    assert state is not None
    turn = await kept.prepare("bench", state)
    text = {"type": "output_text", "text": _WORDS, "annotations": []}
    said = {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "content": [text]}
    answer = {"id": turn.id, "object": "response", "status": "completed", "output": [said]}
    await kept.keep(turn, json.dumps(answer).encode())
    return turn.id


async def _talk(kept: KeptResponses, num: int, turns: int, took: list[float]) -> None:
    previous = ""
    for i in range(num):
        began_at = time.perf_counter()
        previous = await _keep(kept, previous if i % turns else "")
        took.append(time.perf_counter() - began_at)


async def _work() -> None:
    """Holds the event loop half of the time."""
    while True:
        until = time.perf_counter() + _BUSY_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(_BUSY_S)


async def _measure(
    args: argparse.Namespace, url: str, num_at_once: int, *, is_busy: bool
) -> dict[str, object]:
    limits = KeepLimits(
        ttl_s=3600.0,
        max_bytes_per_tenant=1 << 40,
        max_item_bytes=1 << 20,
        max_body_bytes=1 << 24,
        lease_s=30.0,
        max_background=1,
    )
    kept = KeptResponses(Database(url, 30.0, lambda kind, seconds, has_failed: None), limits)
    busy = asyncio.create_task(_work()) if is_busy else None
    try:
        await _talk(kept, 20, args.turns, [])
        took: list[float] = []
        each = args.responses // num_at_once
        began_at, cpu_before = time.perf_counter(), time.process_time()
        talks = [_talk(kept, each, args.turns, took) for _ in range(num_at_once)]
        await asyncio.gather(*talks)
        seconds, cpu_s = time.perf_counter() - began_at, time.process_time() - cpu_before
    finally:
        if busy is not None:
            busy.cancel()
        await kept.database.close()
    ordered = sorted(took)
    return {
        "busy": is_busy,
        "at_once": num_at_once,
        "responses_per_s": round(len(took) / seconds, 1),
        "cpu_ms": round(cpu_s / len(took) * 1e3, 2),
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 2),
        "p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="", help="default: SQLite in a folder of its own")
    parser.add_argument("--responses", type=int, default=400)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--at-once", default="1,8")
    parser.add_argument("--output", default="", help="name of a file in bench/results")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (is_busy, num) in enumerate(
            itertools.product((False, True), map(int, args.at_once.split(",")))
        ):
            url = args.url or f"sqlite:///{folder}/{i}.db"
            rows.append(uvloop.run(_measure(args, url, num, is_busy=is_busy)))
            print(json.dumps(rows[-1]))
    if args.output:
        kind = args.url.partition(":")[0] or "sqlite"
        write_result(args.output, {"store": kind, "rows": rows})


if __name__ == "__main__":
    main()
