#!/usr/bin/env python3
"""Latency of an OpenAI-style server under load, as its clients see it.

Open loop: sessions arrive at random at each of --rates, however slow the server is. Closed loop:
each of --concurrency clients sends its next request when the last was answered. Works against
the router, a decode node, or any other server that speaks the OpenAI API; several URLs are used in
turn.

    # 2000 tokens in, 150 out, at 1 to 16 requests a second
    python -m bench.serving.load --url http://127.0.0.1:8000 --rates 1,2,4,8,16

    # conversations shaped like a public trace, shrunk to a small model, pauses a hundredth
    python -m bench.serving.load --url http://127.0.0.1:8000 --workload conversation \\
        --prompts chat --scale 0.02 --time-scale 0.01 --rates 2,4

Per load one line on standard output; at the end a table, bench/results/NAME.json and a plot of TTFT
and ITL against the load beside it. Definitions: bench/serving/openai_stream.py.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.arguments import parser_of
from bench.figures import Figures
from bench.record import RESULTS, write_result
from bench.serving.openai_stream import Outcome, stream_completion
from bench.serving.prompts import PATHS, Conversation, PromptStyle
from bench.serving.report import Slo, Span, one_line, print_table, summarize
from bench.workload import PRESETS, Preset, exactly, make_session, sessions

_UNFINISHED = "not finished within the drain time"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    target = parser.add_argument_group("server")
    target.add_argument("--url", required=True, help="base URL, or several, comma separated")
    target.add_argument("--model", default="", help="default: the first one the server lists")
    target.add_argument("--api-key", default="", help="sent as a bearer token")

    load = parser.add_argument_group("load")
    kinds = load.add_mutually_exclusive_group()
    kinds.add_argument("--rates", default="1,2,4,8,16", help="open loop: requests per second")
    kinds.add_argument("--concurrency", default="", help="closed loop: numbers of clients")
    load.add_argument("--duration", type=float, default=25.0, help="seconds of arrivals per load")
    load.add_argument(
        "--min-requests", type=int, default=0,
        help="lengthen slow rates to about so many arrivals, but not beyond 60 s",
    )  # fmt: skip
    load.add_argument("--drain", type=float, default=20.0, help="then wait so long for the rest")
    load.add_argument("--warmup", type=int, default=4, help="requests per URL, not counted")
    load.add_argument("--budget-s", type=float, default=1e9, help="begin no new load after this")
    load.add_argument("--seed", type=int, default=7, help="no two loads get the same prompts")

    shape = parser.add_argument_group("workload")
    presets = "\n".join(f"{name}: {preset.description}" for name, preset in PRESETS.items())
    shape.add_argument(
        "--workload", default="fixed", choices=["fixed", *PRESETS],
        help=f"fixed: every request alike. {presets}",
    )  # fmt: skip
    shape.add_argument("--input-tokens", type=int, default=2000, help="fixed: prompt length")
    shape.add_argument("--output-tokens", type=int, default=150, help="fixed: answer length")
    shape.add_argument("--shared-tokens", type=int, default=0, help="fixed: common to all prompts")
    shape.add_argument("--turns", type=int, default=1, help="fixed: turns of each session")
    shape.add_argument("--pause-s", type=float, default=0.0, help="fixed: median pause of turns")
    shape.add_argument("--scale", type=float, default=1.0, help="presets: factor on all lengths")
    shape.add_argument("--time-scale", type=float, default=1.0, help="presets: factor on pauses")
    shape.add_argument("--max-prompt", type=int, default=None, help="presets: longest prompt")

    body = parser.add_argument_group("requests")
    body.add_argument("--prompts", default="ids", choices=list(PATHS), help="token ids (default), "
                      "text, or chat messages")  # fmt: skip
    body.add_argument("--vocab", default="1000:120000", help="ids: range to draw from")
    body.add_argument("--stop-early", action="store_true", help="let answers end before max_tokens")
    body.add_argument("--session-ids", action="store_true", help="name the session in X-Session-ID")
    body.add_argument("--extra", default="{}", help="JSON merged into each body")

    result = parser.add_argument_group("result")
    result.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="for the goodput")
    result.add_argument("--slo-tpot-ms", type=float, default=50.0, help="for the goodput")
    result.add_argument("--name", default="serving", help="of the result file")
    result.add_argument("--dump", action="store_true", help="add a row per request to the result")
    return parser.parse_args(argv)


def chosen_preset(args: argparse.Namespace) -> Preset:
    if args.workload != "fixed":
        return PRESETS[args.workload].scaled(args.scale, args.time_scale, args.max_prompt)
    return Preset(
        description="every request alike",
        first=exactly(max(1, args.input_tokens - args.shared_tokens)),
        output=exactly(args.output_tokens),
        new=exactly(max(1, args.input_tokens - args.shared_tokens)),
        turns=((args.turns, 1.0),),
        pause_median_s=args.pause_s,
        pause_sigma=0.5,
        shared_tokens=args.shared_tokens,
        max_prompt=1 << 40,
    )


@dataclass(slots=True, kw_only=True)
class Load:
    """Sends sessions to the server, in turn to each URL, and keeps every outcome."""

    client: aiohttp.ClientSession
    urls: list[str]
    style: PromptStyle
    preset: Preset
    seed: int
    drain_s: float
    session_ids: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    async def open_loop(self, rate: float, duration_s: float) -> Span:
        """Prompts are made before the clock starts."""
        arrivals = self.arrivals(rate, duration_s)
        return await self.send(arrivals, time.perf_counter(), duration_s)

    def arrivals(
        self, rate: float, duration_s: float, share: int = 0, num_shares: int = 1
    ) -> list[tuple[Conversation, str]]:
        """Returns the sessions and their URLs: of several clients that send the load together, each
        has a share."""
        all_of_them = zip(
            sessions(self.preset, rate, duration_s, self.seed), itertools.cycle(self.urls)
        )
        return [
            (Conversation(session, self.style, self.seed), url)
            for session, url in itertools.islice(all_of_them, share, None, num_shares)
        ]

    async def send(
        self, arrivals: Sequence[tuple[Conversation, str]], start: float, duration_s: float
    ) -> Span:
        """Sends each when it is due, counted from `start`, and waits for the answers."""
        tasks = []
        for conversation, url in arrivals:
            due = start + conversation.session.start_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            run = self._run_session(conversation, url, due, start + duration_s)
            tasks.append(asyncio.create_task(run))
        last_arrival = time.perf_counter()
        await self._drain(tasks, max(last_arrival, start + duration_s))
        return Span(start, last_arrival, time.perf_counter())

    async def closed_loop(self, num_clients: int, duration_s: float) -> Span:
        start = time.perf_counter()
        tasks = [
            asyncio.create_task(self._run_client(index, url, start + duration_s))
            for index, url in zip(range(num_clients), itertools.cycle(self.urls), strict=False)
        ]
        await asyncio.wait(tasks, timeout=duration_s)
        await self._drain(tasks, start + duration_s)
        return Span(start, start + duration_s, time.perf_counter())

    async def _run_client(self, index: int, url: str, until: float) -> None:
        rng = random.Random(f"{self.seed} client {index}")
        for number in itertools.count():
            if time.perf_counter() >= until:
                return
            session = make_session(self.preset, rng, f"c{self.seed}-{index}-{number}", 0.0)
            conversation = Conversation(session, self.style, self.seed)
            await self._run_session(conversation, url, time.perf_counter(), until)

    async def _run_session(
        self, conversation: Conversation, url: str, due: float, until: float
    ) -> None:
        """Runs turn after turn; begins no turn after `until`, and none after an error."""
        headers = {"content-type": "application/json", **self.headers}
        if self.session_ids:
            headers["x-session-id"] = conversation.session.session_id
        for index, turn in enumerate(conversation.session.turns):
            if index > 0:
                due = time.perf_counter() + turn.pause_s
                if due >= until:
                    return
                await asyncio.sleep(turn.pause_s)
            outcome = Outcome(due, wanted_tokens=turn.output_tokens)
            self.outcomes.append(outcome)
            body = conversation.body(index)
            await stream_completion(
                self.client, url + PATHS[self.style.style], body, headers, outcome
            )
            if not outcome.complete:
                return
            conversation.add_answer(outcome)

    async def _drain(self, tasks: list[asyncio.Task[None]], since: float) -> None:
        if not tasks:
            return
        left_s = max(0.0, since + self.drain_s - time.perf_counter())
        _, pending = await asyncio.wait(tasks, timeout=left_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in self.outcomes:
            if outcome.sent is not None and outcome.end is None and outcome.error is None:
                outcome.error = _UNFINISHED


async def with_progress(load: Load, label: str, seconds: float, run: asyncio.Task[Span]) -> Span:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(label, total=seconds)
        start = time.perf_counter()
        while not run.done():
            done = sum(outcome.complete for outcome in load.outcomes)
            bad = sum(outcome.error is not None for outcome in load.outcomes)
            text = f"{label}: {len(load.outcomes)} sent, {done} done, {bad} failed"
            elapsed = min(time.perf_counter() - start, seconds)
            progress.update(bar, completed=elapsed, description=text)
            await asyncio.wait({run}, timeout=0.25)
    return await run


def loads(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Yields a label and what goes into the result for each load."""
    if args.concurrency:
        for count in args.concurrency.split(","):
            yield f"{count} clients", {"concurrency": int(count)}
    else:
        for rate in args.rates.split(","):
            yield f"{rate}/s", {"qps": float(rate)}


async def run_load(args: argparse.Namespace, load: Load, label: str, amount: Figures) -> Figures:
    duration_s = args.duration
    if "concurrency" in amount:
        run = load.closed_loop(amount["concurrency"], duration_s)
    else:
        if amount["qps"] * duration_s < args.min_requests:
            duration_s = max(duration_s, min(60.0, args.min_requests / amount["qps"]))
        run = load.open_loop(amount["qps"], duration_s)
    span = await with_progress(load, label, duration_s, asyncio.create_task(run))
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    figures = {"load": label, **amount, **summarize(load.outcomes, span, slo)}
    if args.dump:
        figures["requests"] = [_row(outcome, span.start) for outcome in load.outcomes]
    return figures


def _row(outcome: Outcome, start: float) -> Figures:
    answered = outcome.sent is not None and outcome.chunks
    return {
        "sent": None if outcome.sent is None else round(outcome.sent - start, 4),
        "first": round(outcome.ttft_s, 4) if answered else None,
        "last": round(outcome.e2e_s, 4) if answered else None,
        "chunks": len(outcome.chunks),
        "tokens": outcome.output_tokens,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "error": outcome.error,
    }


async def first_model(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url + "/v1/models") as response:
        if response.status != 200:
            raise SystemExit(f"error: {url}/v1/models answered {response.status}; give --model")
        return str((await response.json())["data"][0]["id"])


async def calibrated(load: Load) -> PromptStyle:
    """Asks the server, for text prompts, how many tokens our words are."""
    if load.style.style == "ids":
        return load.style
    num_words = 200
    session = make_session(
        Preset(description="", first=exactly(num_words), output=exactly(1)),
        random.Random(load.seed), "calibration", 0.0,
    )  # fmt: skip
    outcome = Outcome(time.perf_counter())
    body = Conversation(session, load.style, load.seed).body(0)
    url = load.urls[0] + PATHS[load.style.style]
    await stream_completion(load.client, url, body, {"content-type": "application/json"}, outcome)
    if outcome.prompt_tokens is None:
        raise SystemExit(f"error: cannot learn prompt lengths: {outcome.error or 'no usage'}")
    return replace(load.style, tokens_per_word=outcome.prompt_tokens / num_words)


async def warm_up(load: Load, count: int) -> None:
    """Warms up at two a second and URL. Raises `SystemExit` when every request fails."""
    if count == 0:
        return
    await load.closed_loop(2 * len(load.urls), 0.5 * count)
    failed = [outcome.error for outcome in load.outcomes if outcome.error]
    print(f"warm-up: {len(load.outcomes) - len(failed)} ok, {len(failed)} failed", file=sys.stderr)
    if load.outcomes and len(failed) == len(load.outcomes):
        raise SystemExit(f"error: every request failed: {failed[0]}")


async def run(args: argparse.Namespace) -> list[Figures]:
    urls = [url.rstrip("/") for url in args.url.split(",")]
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 18
    ) as client:
        low, high = (int(bound) for bound in args.vocab.split(":"))
        style = PromptStyle(
            style=args.prompts, model=args.model or await first_model(client, urls[0]),
            vocabulary=(low, high), ignore_eos=not args.stop_early, extra=json.loads(args.extra),
        )  # fmt: skip
        base = Load(
            client=client, urls=urls, style=style, preset=chosen_preset(args), seed=args.seed,
            drain_s=args.drain, session_ids=args.session_ids,
        )  # fmt: skip
        base.style = await calibrated(base)
        await warm_up(replace(base, outcomes=[], seed=args.seed - 1, drain_s=120.0), args.warmup)
        rows: list[Figures] = []
        begun = time.perf_counter()
        for index, (label, amount) in enumerate(loads(args)):
            if time.perf_counter() - begun > args.budget_s:
                print(f"time is over: {label} and the rest are left out", file=sys.stderr)
                break
            if rows:
                await asyncio.sleep(1.0)
            load = replace(base, outcomes=[], seed=args.seed + 1000 * index)
            rows.append(await run_load(args, load, label, amount))
            print(one_line(rows[-1]), flush=True)
        return rows


def main() -> int:
    args = parse_arguments()
    rows = uvloop.run(run(args))
    print_table(rows, Console(stderr=True))
    settings = {k: v for k, v in vars(args).items() if k not in ("api_key", "url")}
    path = write_result(args.name, {"settings": settings, "loads": rows})
    print(f"written: {path.relative_to(RESULTS.parent.parent)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
