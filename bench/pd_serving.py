#!/usr/bin/env python3
"""Prefill and decode on nodes of their own, against one node: whole clusters under one load.

    # the comparison of docs/performance.md, two GPUs: 2000 tokens in, 150 out
    python -m bench.pd_serving --shape llama-3.1-8b

    # one GPU that all nodes share, and a shorter look
    python -m bench.pd_serving --setups 1p1d-cuda_ipc,1p1d-grpc --rates 1,4 --duration 8

For each setup a cluster is started (`bench.pd_cluster`), then

    1. the load of `bench.serving`: Poisson arrivals at each rate
    2. single requests with their timelines: the stages of the way of one prompt
    3. time between tokens of running answers, with prompts arriving beside them and without; says
       something about the transfer only where prefill nodes have GPUs of their own

and stopped. Writes bench/results/NAME.json with a table, and a plot of TTFT and ITL.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench import serving
from bench.offline_engine import SHAPES
from bench.pd_cluster import Setup, model_folder, running
from bench.record import RESULTS, write_result
from bench.serving_report import Figures, distribution_ms
from cli.cluster import UpSettings

_STAGES = (
    "queue",
    "prefill",
    "first token",
    "first KV byte",
    "last KV byte injected",
    "last byte after first token",
    "second token",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="random weights")
    model.add_argument("--model", default="", help="a checkpoint instead of a shape")
    parser.add_argument("--setups", default="1p1d-cuda_ipc,1p1d-grpc,one", help="comma separated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each node")
    parser.add_argument("--gpu-memory-utilization", type=float, default=None)
    parser.add_argument("--rates", default="1,4,8,16", help="requests per second")
    parser.add_argument("--duration", type=float, default=25.0, help="seconds of each rate")
    parser.add_argument("--warmup", type=int, default=4, help="requests before the first rate")
    parser.add_argument("--input-tokens", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=150)
    parser.add_argument("--vocab", default="1000:120000", help="of prompts")
    parser.add_argument("--timelines", type=int, default=8, help="single requests; 0: none")
    parser.add_argument("--running", type=int, default=8, help="answers beside transfers; 0: none")
    parser.add_argument("--arrivals", type=int, default=16, help="prompts beside them")
    parser.add_argument("--max-model-len", type=int, default=9216)
    parser.add_argument("--node-args", default="", help="more flags for every node, in one word")
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("--name", default="pd_serving", help="of the result files")
    return parser.parse_args(argv)


def node_args(args: argparse.Namespace) -> list[str]:
    return [
        *([] if args.model else ["--load-format", "dummy"]),
        *("--max-model-len", str(args.max_model_len), "--block-size", "128"),
        *("--max-num-batched-tokens", "8192", "--no-enable-prefix-caching"),
        *args.node_args.split(),
    ]


class Client:
    """Single requests to one cluster."""

    def __init__(self, session: aiohttp.ClientSession, url: str, args: argparse.Namespace) -> None:
        self._session = session
        self._url = url
        self._num_tokens = args.input_tokens
        low, high = (int(bound) for bound in args.vocab.split(":"))
        self._vocabulary = (low, high)
        self._number = 0

    def body(self, max_tokens: int, num_tokens: int | None = None) -> dict[str, Any]:
        """With a prompt that nobody has seen."""
        self._number += 1
        low, high = self._vocabulary
        length = num_tokens or self._num_tokens
        prompt = [low + (self._number * 7919 + i * i * 31) % (high - low) for i in range(length)]
        return {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    async def ask(self, body: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        """When each chunk came, and the timeline. Raises `SystemExit` for a refused request."""
        arrivals: list[float] = []
        timeline: dict[str, Any] = {}
        headers = {"x-tandem-timeline": "1"}
        async with self._session.post(
            f"{self._url}/v1/completions", json=body, headers=headers
        ) as response:
            if response.status != 200:
                raise SystemExit(f"error: {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                timeline = event.get("timeline") or timeline
                if any(c.get("token_ids") or c.get("text") for c in event.get("choices", ())):
                    arrivals.append(now)
        return arrivals, timeline


async def stages(client: Client, count: int) -> Figures:
    """Milliseconds since the decode node had the request, medians of `count`."""
    rows: dict[str, list[float]] = {name: [] for name in _STAGES}
    paths: list[str] = []
    for _ in range(count):
        _, timeline = await client.ask(client.body(max_tokens=4))
        paths.append(timeline["path"])
        first, last = timeline["first_token_s"], timeline["kv_last_byte_s"]
        found = (
            timeline["queue_s"],
            timeline["prefill_s"],
            first,
            timeline["kv_first_byte_s"],
            last,
            None if last is None else last - first,
            timeline["second_token_s"],
        )
        for name, value in zip(_STAGES, found, strict=True):
            if value is not None:
                rows[name].append(value)
    return {"paths": paths, **{name: distribution_ms(values) for name, values in rows.items()}}


async def interference(client: Client, running: int, arrivals: int) -> Figures:
    """Time between tokens of `running` long answers: alone, then while prompts arrive whose KV
    comes over and which then end."""
    long_answers = [
        asyncio.create_task(client.ask(client.body(max_tokens=1200, num_tokens=64)))
        for _ in range(running)
    ]
    await asyncio.sleep(2.0)
    quiet = (time.perf_counter(), time.perf_counter() + 2.0)
    await asyncio.sleep(2.0)
    busy_start = time.perf_counter()
    for _ in range(arrivals):
        if any(task.done() for task in long_answers):
            break
        await client.ask(client.body(max_tokens=2))
    busy = (busy_start, time.perf_counter())
    answers = [chunks for chunks, _ in await asyncio.gather(*long_answers)]
    alone, beside = (distribution_ms(gaps_within(answers, span)) for span in (quiet, busy))
    ratio = beside["p99"] / alone["p99"] if alone and beside else None
    return {"alone": alone, "beside transfers": beside, "p99 ratio": ratio}


def gaps_within(answers: Sequence[Sequence[float]], span: tuple[float, float]) -> list[float]:
    return [
        later - one
        for chunks in answers
        for one, later in itertools.pairwise(chunks)
        if span[0] <= one and later <= span[1]
    ]


async def measure(setup: Setup, model: str, args: argparse.Namespace) -> Figures:
    settings = UpSettings(
        model=model,
        device=args.device,
        tp=args.tp,
        gpu_memory_utilization=args.gpu_memory_utilization,
        _cli_parse_args=[],
    )
    async with running(setup, settings, node_args(args), args.start_timeout_s) as url:
        load = serving.parse_arguments(
            [
                *("--url", url, "--rates", args.rates, "--duration", str(args.duration)),
                *("--warmup", str(args.warmup), "--vocab", args.vocab),
                *("--input-tokens", str(args.input_tokens)),
                *("--output-tokens", str(args.output_tokens)),
                *("--extra", '{"return_token_ids": true}'),
            ]
        )
        figures: Figures = {"setup": setup.name, "loads": await serving.run(load)}
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            client = Client(session, url, args)
            if args.timelines:
                figures["stages"] = await stages(client, args.timelines)
            if args.running:
                figures["interference"] = await interference(client, args.running, args.arrivals)
        return figures


def print_tables(results: list[Figures], console: Console) -> None:
    table = Table(title="ms at the client: mean/p50/p99", box=SIMPLE)
    for heading in ("setup", "QPS", "done", "errors", "TTFT", "ITL", "tok/s"):
        table.add_column(heading, no_wrap=True)
    for result in results:
        for row in result["loads"]:
            table.add_row(
                result["setup"], row["load"], str(row["done"]), str(row["num_errors"]),
                _three(row["ttft_ms"]), _three(row["itl_ms"]), f"{row['out_tok_per_s'] or 0:.0f}",
            )  # fmt: skip
    console.print(table)
    stages_table = Table(title="one request at a time, median ms", box=SIMPLE)
    stages_table.add_column("stage")
    for result in results:
        stages_table.add_column(result["setup"], justify="right")
    for name in _STAGES:
        found = [result.get("stages", {}).get(name) for result in results]
        stages_table.add_row(name, *(f"{one['p50']:.1f}" if one else "" for one in found))
    console.print(stages_table)
    for result in results:
        if ratio := result.get("interference", {}).get("p99 ratio"):
            console.print(f"{result['setup']}: ITL p99 beside transfers / alone: {ratio:.2f}")


def _three(figures: Figures | None) -> str:
    return "" if figures is None else "/".join(f"{figures[q]:.1f}" for q in ("mean", "p50", "p99"))


def plot(results: list[Figures], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axis, (key, label) in zip(
        figure.subplots(1, 2), (("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms")), strict=True
    ):
        for number, result in enumerate(results):
            rows = [row for row in result["loads"] if row[key]]
            rates = [row["qps"] for row in rows]
            for quantile, style in (("p50", "o-"), ("p99", "s--")):
                axis.plot(
                    rates, [row[key][quantile] for row in rows], style, color=f"C{number}",
                    label=f"{result['setup']} {quantile}",
                )  # fmt: skip
        axis.set(xlabel="requests per second", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)


async def run(args: argparse.Namespace, model: str) -> list[Figures]:
    results = []
    for name in args.setups.split(","):
        results.append(await measure(Setup.parse(name), model, args))
        write(args, results)
    return results


def write(args: argparse.Namespace, results: list[Figures]) -> None:
    """After each setup, so that a later failure loses nothing."""
    path = write_result(args.name, {"settings": vars(args), "setups": results})
    plot(results, RESULTS / f"{args.name}.png")
    print(f"written: {path.relative_to(RESULTS.parent.parent)} and .png", file=sys.stderr)


def main() -> int:
    args = parse_arguments()
    if args.model:
        results = uvloop.run(run(args, args.model))
    else:
        with model_folder(args.shape) as folder:
            results = uvloop.run(run(args, str(folder)))
    print_tables(results, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
