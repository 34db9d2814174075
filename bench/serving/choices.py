#!/usr/bin/env python3
"""n answers to one prompt (`n`), on a prefill and a decode node: what is computed and what moves.

    python -m bench.serving.choices --shape llama-3.1-8b
    python -m bench.serving.choices --model demo --device cpu --input-tokens 900 --choices 1,8

For each number of choices: prompts that nobody has seen, one request at a time, without prefix
caches. Beside it stands the same work as n requests at once, one choice each, which is what a
client without `n` would send. Written for each, as medians of a request: prompt tokens computed on
the prefill node, bytes of KV that decode received, milliseconds until the first choice and until
every choice has its first token, and until all have ended. Writes bench/results/choices.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop

from bench.engine.models.shapes import SHAPES
from bench.record import write_result
from bench.serving.node_metrics import read_metrics
from bench.serving.pd_client import Client
from bench.serving.pd_cluster import Cluster, Setup, model_folder, running
from bench.serving.report import Figures
from cli.cluster import UpSettings

COMPUTED = "vllm:prompt_tokens_total"
"""Counts what a prefill node computes, when it has no prefix cache."""
RECEIVED = "tandem_kv_received_bytes_total"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="random weights")
    model.add_argument("--model", default="", help="a checkpoint instead of a shape")
    parser.add_argument("--setup", default="1p1d-stream")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--choices", default="1,2,4,8", help="numbers of choices")
    parser.add_argument("--requests", type=int, default=8, help="of each number")
    parser.add_argument("--input-tokens", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--vocab", default="1000:120000", help="of prompts")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Answer:
    """Says how many seconds after sending each choice began, and the last one ended."""

    begins: list[float]
    end: float


class Bench:
    """Sends requests, and reads what the nodes counted meanwhile."""

    def __init__(
        self, session: aiohttp.ClientSession, cluster: Cluster, args: argparse.Namespace
    ) -> None:
        self._session = session
        self._cluster = cluster
        self._args = args
        low, high = (int(bound) for bound in args.vocab.split(":"))
        self._client = Client(session, cluster, args.input_tokens, (low, high))

    async def measure(self, num_choices: int, *, together: bool) -> Figures:
        """Returns medians over requests with `num_choices` choices, or over as many requests with
        one."""
        rows: list[tuple[float, ...]] = []
        for _ in range(self._args.requests):
            body = self._client.body(self._args.output_tokens)
            body |= {"temperature": 1.0, "seed": 1}
            before = await self._counted()
            if together:
                answers = [await self._ask({**body, "n": num_choices})]
            else:
                bodies = [{**body, "seed": 1 + i} for i in range(num_choices)]
                answers = list(await asyncio.gather(*map(self._ask, bodies)))
            begins = [begin for answer in answers for begin in answer.begins]
            assert len(begins) == num_choices
            computed, received = await self._counted()
            rows.append(
                (
                    computed - before[0],
                    received - before[1],
                    1e3 * min(begins),
                    1e3 * max(begins),
                    1e3 * max(answer.end for answer in answers),
                )
            )
        names = ("prompt_tokens_computed", "kv_bytes", "first_ms", "all_begun_ms", "all_ended_ms")
        medians = [round(statistics.median(column), 2) for column in zip(*rows, strict=True)]
        return {
            "choices": num_choices,
            "requests": 1 if together else num_choices,
            **dict(zip(names, medians, strict=True)),
        }

    async def _ask(self, body: dict[str, Any]) -> Answer:
        begins: dict[int, float] = {}
        started = now = time.perf_counter()
        async with self._session.post(f"{self._cluster.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"error: {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter() - started
                for choice in json.loads(line[6:]).get("choices", ()):
                    begins.setdefault(choice["index"], now)
        return Answer(list(begins.values()), now)

    async def _counted(self) -> tuple[float, float]:
        """Returns (prompt tokens computed, bytes of KV received) since the start."""
        prefills = [await read_metrics(self._session, url) for url in self._cluster.prefill_metrics]
        decodes = [await read_metrics(self._session, url) for url in self._cluster.decode_metrics]
        return (
            sum(metrics[COMPUTED] for metrics in prefills),
            sum(metrics.get(RECEIVED, 0.0) for metrics in decodes),
        )


async def run(args: argparse.Namespace, model: str) -> list[Figures]:
    settings = UpSettings(model=model, device=args.device, _cli_parse_args=[])
    needed = args.input_tokens + args.output_tokens
    flags = [
        *([] if args.model else ["--load-format", "dummy"]),
        *("--max-model-len", str(-(-needed // 1024) * 1024), "--no-enable-prefix-caching"),
        *("--block-size", str(args.block_size), "--max-num-batched-tokens", "8192"),
    ]
    results: list[Figures] = []
    setup = Setup.parse(args.setup)
    async with running(setup, settings, flags, args.start_timeout_s) as cluster:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            bench = Bench(session, cluster, args)
            await bench.measure(2, together=True)
            for num_choices in map(int, args.choices.split(",")):
                for together in (True, False) if num_choices > 1 else (True,):
                    results.append(await bench.measure(num_choices, together=together))
                    print(results[-1])
    return results


def main() -> int:
    args = parse_arguments()
    if args.model:
        results = uvloop.run(run(args, args.model))
    else:
        with model_folder(args.shape) as folder:
            results = uvloop.run(run(args, str(folder)))
    path = write_result("choices", {"settings": vars(args), "rows": results})
    print(f"written: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
