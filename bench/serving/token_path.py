"""Measures what a decode node's HTTP server costs a token, and how long a token is on its way.

    python -m bench.serving.token_path --rows 64,128,256 --step-ms 8

A real node and real connections, each in a process of its own, around an engine core that has no
model (`bench.serving.paced_core`): every step has one token for each of this many requests, and new
requests come as old ones end. For each number of rows:

    us_per_token     CPU time of the server's process, by the tokens that it passed on meanwhile
    delay_ms         from when the core sent a step until the client had the token
    step_ms          the same for the last row of each step
    first_ms         the same for first tokens, which come whenever they do, as from a prefill node
    itl_ms           between two tokens of an answer, first ones left out
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.record import write_result
from bench.serving.paced_core import PACE, Pace, PacedRun
from bench.serving.stream_clients import Stream, StreamClients
from edge.http import headers as names
from engine.frontend.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
_MODEL = "bench"
_WARM_S = 2.0
_READY_S = 60.0
_PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Once upon a time"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once"}]}),
}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Is one run. `api`: a key of `_PATHS`; `is_routed`: as routers ask, with a journal."""

    rows: int
    step_ms: float
    tokens: int
    seconds: float
    api: str
    is_routed: bool
    checkpoint: str


def main() -> None:
    args = _arguments()
    figures = []
    for rows in args.rows:
        case = Case(
            rows=rows,
            step_ms=args.step_ms,
            tokens=args.tokens,
            seconds=args.seconds,
            api=args.api,
            is_routed=not args.direct,
            checkpoint=args.checkpoint,
        )
        found = run(case)
        figures.append(found)
        print(json.dumps(found), flush=True)
    if args.name:
        print(write_result(args.name, figures))


def run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, _node(case, Path(folder)) as node:
        streams, cpu_s, cpu_tokens = _load(case, node)
        node.stop()
        paced = msgspec.json.decode(node.result.read_bytes(), type=PacedRun)
    return {
        "rows": case.rows,
        "step_ms": case.step_ms,
        "api": case.api,
        "is_routed": case.is_routed,
        "us_per_token": round(1e6 * cpu_s / max(1, cpu_tokens), 1),
        "tokens": cpu_tokens,
        **Delays.of(streams, paced).figures(),
    }


@dataclass(slots=True)
class _Node:
    process: subprocess.Popen[bytes]
    address: tuple[str, int]
    result: Path

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(_READY_S)


@contextmanager
def _node(case: Case, folder: Path) -> Iterator[_Node]:
    """Starts the node and waits until it serves."""
    text = (ROOT / "docs" / "architecture.md").read_text()[:20_000]
    # One event for each token: text of one byte a character has no tokens without text.
    text = text.encode("ascii", "ignore").decode()
    ids = Tokenizer.from_folder(case.checkpoint).encode(text, add_special_tokens=False)
    result = folder / "run.json"
    pace = Pace(step_s=case.step_ms / 1e3, token_ids=ids, result_path=str(result))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bench.serving.paced_node"),
            *(
                "--model",
                case.checkpoint,
                "--served-model-name",
                _MODEL,
                "--port",
                "0",
                "--device",
                "cpu",
                "--num-threads",
                "1",
            ),
            *("--max-num-seqs", str(2 * case.rows), "--num-blocks", "256"),
        ],
        cwd=ROOT,
        env={**os.environ, PACE: msgspec.json.encode(pace).decode()},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                host, _, port = event["address"].rpartition(":")
                yield _Node(process, (host, int(port)), result)
                break
        else:
            raise RuntimeError("the node ended before it served")
    finally:
        process.kill()
        process.wait()


def _load(case: Case, node: _Node) -> tuple[list[Stream], float, int]:
    """Returns the streams, the server's CPU time behind the first seconds, and tokens of it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    clients = multiprocessing.get_context("spawn").Process(
        target=_run_clients, args=(theirs, node.address, case), daemon=True
    )
    clients.start()
    ours.recv()
    time.sleep(_WARM_S)
    begun_at, begun_cpu_s = time.monotonic(), node.cpu_s()
    time.sleep(case.seconds)
    ended_at, cpu_s = time.monotonic(), node.cpu_s() - begun_cpu_s
    streams = msgspec.msgpack.decode(ours.recv_bytes(), type=list[Stream])
    clients.join()
    tokens = sum(begun_at <= at < ended_at for stream in streams for at in stream.times)
    return streams, cpu_s, tokens


def _run_clients(pipe: Connection, address: tuple[str, int], case: Case) -> None:
    path, asked = _PATHS[case.api]
    body = {"model": _MODEL, "stream": True, "max_tokens": case.tokens, "ignore_eos": True, **asked}
    headers: Mapping[str, str] = {names.JOURNAL: "1"} if case.is_routed else {}
    clients = StreamClients(address, path, dict(headers), body)
    pipe.send("begun")
    uvloop.run(clients.run(case.rows, _WARM_S + case.seconds + 0.5))
    pipe.send_bytes(msgspec.msgpack.encode(clients.streams))


@dataclass(slots=True)
class Delays:
    """Holds seconds on the way, of tokens sent when all requests were under way."""

    tokens: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    by_step: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, streams: list[Stream], run: PacedRun) -> Delays:
        delays = cls()
        by_name = {one.request_id.rpartition("-")[0]: one for one in run.requests}
        since = min((stream.sent_at for stream in streams), default=0.0) + _WARM_S
        for stream in streams:
            sent = by_name.get(stream.request_id)
            if sent is None:
                continue
            last: float | None = None
            for k, came_at in enumerate(stream.times):
                step = sent.first_step + k - 1
                sent_at = sent.first_at if k == 0 else run.steps[step]
                if sent_at < since:
                    continue
                if k == 0:
                    delays.firsts.append(came_at - sent_at)
                    continue
                delays.tokens.append(came_at - sent_at)
                delays.by_step[step] = max(delays.by_step.get(step, 0.0), came_at - sent_at)
                if last is not None:
                    delays.gaps.append(came_at - last)
                last = came_at
        return delays

    def figures(self) -> dict[str, Any]:
        return {
            "delay_ms": _quantiles(self.tokens),
            "step_ms_passed": _quantiles(list(self.by_step.values())),
            "first_ms": _quantiles(self.firsts),
            "itl_ms": _quantiles(self.gaps),
        }


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    last = len(ordered) - 1
    found = {name: round(1e3 * ordered[int(q * last)], 2) for name, q in _QUANTILES.items()}
    return {**found, "count": len(ordered)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=_numbers, default=[64, 128, 256])
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured")
    parser.add_argument("--api", choices=_PATHS, default="completions")
    parser.add_argument("--direct", action="store_true", help="as clients without a router ask")
    parser.add_argument("--checkpoint", default=str(ROOT / "cli" / "demo_checkpoint"))
    parser.add_argument("--name", default="", help="of the result file; none: printed only")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
