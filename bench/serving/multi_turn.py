#!/usr/bin/env python3
"""Conversations of many turns with tool calls, against a cluster whose prefill nodes have ever more
places to take a prompt's beginning from.

    python -m bench.serving.multi_turn --shape llama-3.1-8b       two GPUs or more, 64 sessions
    python -m bench.serving.multi_turn --device cpu --small       the demo checkpoint, a few minutes

Each session is a chat of --turns turns: a long opening that several sessions share (instructions
and tools), then questions, and at every other turn the result of a tool in place of a question.
Answers have their exact length and are part of the next prompt, token by token. A session asks
again after a pause. The same sessions run against a fresh cluster in each mode:

    cache     the prefix cache of each prefill node, and nothing else
    host      + KV in host memory
    peers     + prefixes from the other prefill nodes
    return    + the KV of answers, from decode nodes
    store     KV in host memory, and in a store that the prefill nodes share, but nothing of peers

Reported are the prompt tokens that prefill nodes computed and where the rest came from, the times
to the first token, and how many sessions had other answers than in the first mode, which must be
none where steps are computed alike whatever is in them. Writes
bench/results/NAME.json (--name '': nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.arguments import parser_of
from bench.engine.models.shapes import SHAPES
from bench.figures import distribution_ms
from bench.record import write_result
from bench.serving.clusters.node_metrics import by_label
from bench.serving.clusters.pd_cluster import add_cluster, model_folder, supervised, tell_progress
from bench.serving.load import first_model
from bench.serving.openai_stream import completion
from bench.serving.soak import metrics_url, until_nothing_is_held
from cli.local_cluster.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs
from cli.local_cluster.supervisor import Service, ServiceSpec
from tests.kv_transfer.mooncake_processes import mooncake, python_path

MODES = ("cache", "host", "peers", "return")
STORE = "store"
_SOURCES = "vllm:prompt_tokens_by_source_total"
_KEEPERS = 4
"""Processes that lend a store memory."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each part; ranges are drawn from evenly."""

    opening: int
    question: tuple[int, int]
    tool_result: tuple[int, int]
    answer: tuple[int, int]


FULL = Lengths(2000, (60, 240), (400, 1200), (100, 300))
SMALL = Lengths(800, (10, 30), (40, 80), (16, 32))


class Session:
    """One conversation: what it asks is drawn from its number alone."""

    def __init__(self, number: int, lengths: Lengths, vocab: tuple[int, int], sharing: int) -> None:
        self.number = number
        self._lengths = lengths
        self._vocab = vocab
        self._rng = random.Random(number)
        opening = random.Random(-1 - number // sharing)
        self.tokens = [opening.randint(*vocab) for _ in range(lengths.opening)]

    def ask(self, turn: int) -> int:
        """Adds a question, or a tool's result, to the conversation. Returns the answer's length."""
        is_tool = turn % 2 == 1
        span = self._lengths.tool_result if is_tool else self._lengths.question
        new = self._rng.randint(*span)
        self.tokens += [self._rng.randint(*self._vocab) for _ in range(new)]
        return self._rng.randint(*self._lengths.answer)


class Run:
    """All sessions against one cluster."""

    def __init__(self, client: aiohttp.ClientSession, url: str, args: argparse.Namespace) -> None:
        self._client = client
        self._url = url
        self._args = args
        self.ttft_s: list[list[float]] = [[] for _ in range(args.turns)]
        """Holds the times by turn."""
        self.errors: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_done = 0
        self.digests: dict[int, str] = {}
        """Hashes of all that was said, by session."""

    async def all_sessions(self, model: str, lengths: Lengths) -> None:
        vocab = (10, self._args.vocab - 1)
        sessions = [
            Session(number, lengths, vocab, self._args.sharing)
            for number in range(self._args.sessions)
        ]
        total = self._args.sessions * self._args.turns
        progress = tell_progress(lambda seconds: f"{self.num_done} of {total} turns")
        telling = asyncio.create_task(progress)
        try:
            await asyncio.gather(*(self._session(session, model) for session in sessions))
        finally:
            telling.cancel()

    async def _session(self, session: Session, model: str) -> None:
        pause = random.Random(1000 + session.number)
        await asyncio.sleep(pause.random() * self._args.pause_s)
        for turn in range(self._args.turns):
            num_answer = session.ask(turn)
            body = {
                "model": model,
                "prompt": session.tokens,
                "max_tokens": num_answer,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            name = {"x-session-id": f"s{session.number}"}
            outcome = await completion(self._client, self._url, body, name, num_answer)
            if not outcome.complete or len(outcome.token_ids) != num_answer:
                self.errors[outcome.error or "an answer of another length"] += 1
                return
            self.num_prompt_tokens += len(session.tokens)
            self.num_done += 1
            self.ttft_s[turn].append(outcome.ttft_s)
            session.tokens += outcome.token_ids
            await asyncio.sleep(pause.random() * 2 * self._args.pause_s)
        self.digests[session.number] = hashlib.sha256(repr(session.tokens).encode()).hexdigest()


def specs_of(
    mode: str, settings: UpSettings, args: argparse.Namespace, store_url: str = ""
) -> list[ServiceSpec]:
    """Returns the services of a cluster in that mode."""
    level = MODES.index("host" if mode == STORE else mode)
    prefill = ["--enable-prefix-caching"]
    if store_url:
        prefill += ["--kv-store", store_url]
    decode = ["--enable-prefix-caching"] if level >= MODES.index("return") else []
    if args.prefill_cache_bytes:
        prefill += ["--kv-cache-memory-bytes", str(args.prefill_cache_bytes)]
    if level >= MODES.index("host"):
        prefill += ["--kv-host-memory-bytes", str(args.host_bytes)]
    if level >= MODES.index("peers"):
        prefill += ["--kv-share-prefixes", args.share]
    if decode:
        decode += ["--kv-share-prefixes", args.share]
    more = {"prefill": prefill, "decode": decode}
    node_args = [*(["--load-format", "dummy"] if args.shape else []), *args.node_args.split()]
    return [
        replace(spec, argv=(*spec.argv, *more.get(spec.name.partition("-")[0], [])))
        for spec in cluster_specs(settings, node_args)
    ]


async def sources(client: aiohttp.ClientSession, nodes: list[Service]) -> Counter[str]:
    """Returns prompt tokens by where their KV came from, over nodes."""
    found: Counter[str] = Counter()
    for node in nodes:
        found.update(await by_label(client, metrics_url(node), _SOURCES, "source"))
    return found


async def run_mode(mode: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    settings = UpSettings(
        model=model,
        prefill=args.prefill,
        decode=args.decode,
        tp=args.tp,
        device=args.device,
        port=0,
        _cli_parse_args=[],
    )
    with store_for(mode, args) as store_url:
        specs = specs_of(mode, settings, args, store_url)
        return await run_cluster(specs, settings, args)


@contextmanager
def store_for(mode: str, args: argparse.Namespace) -> Iterator[str]:
    """Starts a store for that mode. Yields its URL; empty: the mode has none."""
    if mode != STORE:
        yield ""
        return
    os.environ["PYTHONPATH"] = python_path()
    memory_mib = 2 * args.prefill * args.host_bytes // _KEEPERS // 2**20
    with (
        tempfile.TemporaryDirectory() as log,
        mooncake(Path(log), max(64, memory_mib), _KEEPERS) as store,
    ):
        yield store.url


async def run_cluster(
    specs: list[ServiceSpec], settings: UpSettings, args: argparse.Namespace
) -> dict[str, Any]:
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with (
        supervised(specs, settings) as supervisor,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as client,
    ):
        return await measure(client, specs[0].endpoint, supervisor.services[1:], args)


async def measure(
    client: aiohttp.ClientSession, url: str, nodes: list[Service], args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the figures of one mode, from a cluster that is ready."""
    model = await first_model(client, url)
    prefills = [node for node in nodes if node.spec.name.startswith("prefill")]
    before = await sources(client, prefills)
    run, started = Run(client, url, args), time.monotonic()
    await run.all_sessions(model, SMALL if args.small else FULL)
    seconds = time.monotonic() - started
    settled_s, left = await until_nothing_is_held(client, nodes)
    found = await sources(client, prefills)
    found.subtract(before)
    later = [value for turn in run.ttft_s[1:] for value in turn]
    return {
        "seconds": round(seconds, 1),
        "turns": run.num_done,
        "errors": dict(run.errors),
        "prompt_tokens": run.num_prompt_tokens,
        "prefill_tokens_by_source": {name: int(value) for name, value in found.items()},
        "ttft_ms_first_turns": distribution_ms(run.ttft_s[0]),
        "ttft_ms_later_turns": distribution_ms(later),
        "settled_s": settled_s,
        "left": left,
        "digests": run.digests,
    }


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "multi_turn")
    add_cluster(parser, prefill=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights in its place")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--sharing", type=int, default=8, help="sessions with the same opening")
    parser.add_argument("--pause-s", type=float, default=2.0, help="between turns, on average")
    parser.add_argument("--small", action="store_true", help="lengths for the demo checkpoint")
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are below")
    parser.add_argument(
        "--prefill-cache-bytes", type=int, default=0, help="of each prefill node; 0: measured"
    )
    parser.add_argument("--host-bytes", type=int, default=16 << 30, help="of each prefill node")
    parser.add_argument("--share", default="auto", choices=["auto", "always"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=[*MODES, STORE])
    return parser.parse_args()


async def run_all(model: str, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    first: dict[int, str] = {}
    for mode in args.modes:
        print(f"mode {mode}", file=sys.stderr, flush=True)
        found = await run_mode(mode, model, args)
        digests: dict[int, str] = found.pop("digests")
        first = first or digests
        found["sessions_with_other_tokens"] = sum(
            digest != first.get(number) for number, digest in digests.items()
        )
        figures[mode] = found
        print(json.dumps({mode: figures[mode]}), flush=True)
    return figures


def main() -> int:
    args = parse_arguments()
    model = args.model or str(DEMO_CHECKPOINT)
    with model_folder(args.shape) if args.shape else nullcontext(model) as folder:
        figures = asyncio.run(run_all(str(folder), args))
    if args.name:
        settings = {name: value for name, value in vars(args).items() if name != "name"}
        print("written:", write_result(args.name, {"settings": settings, "modes": figures}))
    return 0 if not any(one["left"] or one["errors"] for one in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
