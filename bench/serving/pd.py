#!/usr/bin/env python3
"""Prefill and decode on nodes of their own, against one node: whole clusters under one load.

    # the comparison of docs/performance.md, two GPUs: 2000 tokens in, 150 out
    python -m bench.serving.pd --shape llama-3.1-8b

    # one GPU that all nodes share, and a shorter look
    python -m bench.serving.pd --setups 1p1d-cuda_ipc,1p1d-stream --rates 1,4 --duration 8

    # other ratios of the tiers, on four GPUs
    python -m bench.serving.pd --setups 2p1d,1p2d,3p1d --rates 4,8,16,24 --duration 10

For each setup a cluster is started (`bench.serving.pd_cluster`), then

    1. the load of `bench.serving.load`: Poisson arrivals at each rate
    2. single requests with their timelines: the stages of the way of one prompt
    3. time between tokens of running answers, with prompts arriving beside them and without; says
       something about the transfer only where prefill nodes have GPUs of their own

and stopped. Prefix caches are off. Prints a line for each rate, and writes
bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import sys

import aiohttp
import uvloop

from bench.arguments import parser_of
from bench.engine.models.shapes import SHAPES
from bench.figures import Figures
from bench.record import RESULTS, write_result
from bench.serving import load as serving
from bench.serving.pd_client import Client, interference, stages
from bench.serving.pd_cluster import Setup, model_folder, running
from cli.local_cluster.cluster import UpSettings


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="random weights")
    model.add_argument("--model", default="", help="a checkpoint instead of a shape")
    parser.add_argument("--setups", default="1p1d-cuda_ipc,1p1d-stream,one", help="comma separated")
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
    parser.add_argument(
        "--max-model-len", type=int, default=0, help="default: what the prompts take"
    )
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--node-args", default="", help="more flags for every node, in one word")
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("--name", default="pd_serving", help="of the result file")
    return parser.parse_args(argv)


def node_args(args: argparse.Namespace) -> list[str]:
    """Returns the arguments of every node; of two that name one flag the later counts."""
    needed = max(args.input_tokens + args.output_tokens, 64 + 1200)
    return [
        *([] if args.model else ["--load-format", "dummy"]),
        *("--max-model-len", str(args.max_model_len or -(-needed // 1024) * 1024)),
        *("--block-size", str(args.block_size), "--max-num-batched-tokens", "8192"),
        "--no-enable-prefix-caching",
        *args.node_args.split(),
    ]


async def measure(name: str, model: str, args: argparse.Namespace) -> Figures:
    settings = UpSettings(
        model=model,
        device=args.device,
        tp=args.tp,
        gpu_memory_utilization=args.gpu_memory_utilization,
        _cli_parse_args=[],
    )
    flags, setup = node_args(args), Setup.parse(name)
    async with running(setup, settings, flags, args.start_timeout_s) as cluster:
        load = serving.parse_arguments(
            [
                *("--url", cluster.url, "--rates", args.rates, "--duration", str(args.duration)),
                *("--warmup", str(args.warmup), "--vocab", args.vocab),
                *("--input-tokens", str(args.input_tokens)),
                *("--output-tokens", str(args.output_tokens)),
                *("--extra", '{"return_token_ids": true}'),
            ]
        )
        figures: Figures = {
            "name": name,
            "setup": setup.name,
            "node_args": flags,
            "loads": await serving.run(load) if args.rates else [],
        }
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            low, high = (int(bound) for bound in args.vocab.split(":"))
            client = Client(session, cluster, args.input_tokens, (low, high))
            if args.timelines:
                figures["stages"] = await stages(client, args.timelines)
            if args.running:
                figures["interference"] = await interference(client, args.running, args.arrivals)
        return figures


async def run(args: argparse.Namespace, model: str) -> None:
    results: list[Figures] = []
    for name in args.setups.split(","):
        results.append(await measure(name, model, args))
        write(args, results)


def write(args: argparse.Namespace, results: list[Figures]) -> None:
    """Writes the result after each setup, so that a later failure loses nothing."""
    path = write_result(args.name, {"settings": vars(args), "setups": results})
    print(f"written: {path.relative_to(RESULTS.parent.parent)}", file=sys.stderr)


def main() -> int:
    args = parse_arguments()
    if args.model:
        uvloop.run(run(args, args.model))
    else:
        with model_folder(args.shape) as folder:
            uvloop.run(run(args, str(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
