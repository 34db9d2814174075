"""Arguments of `bench.serving.goodput`: which server, which load, which result."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path

from bench.arguments import parser_of
from bench.engine.models.shapes import SHAPES
from bench.serving.batch_beside import BatchBeside
from bench.serving.clusters.imitated_core import Imitation

_LOAD = re.compile(r"(\d+)/(\d+)@([\d.,]+)")
_DEFAULT_LOAD = "2000/150@24,48"
_MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and answers of one length, at several rates."""

    n_in: int
    n_out: int
    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Reads IN/OUT@RATE,RATE; raises `argparse.ArgumentTypeError`."""
        if (found := _LOAD.fullmatch(text)) is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like {_DEFAULT_LOAD}")
        rates = tuple(float(rate) for rate in found[3].split(",") if rate)
        return cls(int(found[1]), int(found[2]), rates)


def batch_of(text: str) -> BatchBeside:
    """Reads IN/OUT; raises ValueError."""
    n_in, n_out = text.split("/")
    return BatchBeside(int(n_in), int(n_out))


def imitation_of(text: str) -> Imitation:
    """Reads STEP_MS/TOKENS_PER_S; raises ValueError."""
    step_ms, rate = text.split("/")
    return Imitation(float(step_ms) / 1e3, float(rate))


def parse_arguments(doc: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(doc)
    who = parser.add_argument_group("server")
    which = who.add_mutually_exclusive_group()
    which.add_argument(
        "--nodes", default="3p1d",
        help="NpMd, 0pNd (N undivided nodes), NpMd-stream (KV by gRPC); or several by comma",
    )  # fmt: skip
    which.add_argument("--url", default="", help="of a server that runs, or several by comma")
    who.add_argument("--tag", default="", help="name of the engine; default: tandem-NODES")
    who.add_argument("--gpus", type=int, default=None, help="with --url: all that it uses")
    who.add_argument("--model", default="", help="with --url: default: the first that it lists")
    model = who.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="random weights")
    model.add_argument("--checkpoint", default="", help="instead of a shape")
    who.add_argument(
        "--kv-transports", choices=["auto", "cuda_ipc", "stream"], default="auto",
        help="auto: CUDA IPC between GPUs of one host; stream: gRPC",
    )  # fmt: skip
    who.add_argument(
        "--imitate", type=imitation_of, metavar="STEP_MS/TOKENS_PER_S",
        help="real services around engines that are imitated (clusters/imitated_core.py)",
    )  # fmt: skip
    who.add_argument("--tp", type=int, default=1, help="GPUs of each node")
    who.add_argument("--device", default="auto")
    who.add_argument("--node-args", default="", help="more flags for every node, in one word")
    who.add_argument("--start-timeout-s", type=float, default=240.0)

    load = parser.add_argument_group("load")
    load.add_argument(
        "--load", action="append", type=Workload.parse, default=[], metavar="IN/OUT@RATE,RATE",
        help=f"tokens in and out, requests a second; may be repeated; default: {_DEFAULT_LOAD}",
    )  # fmt: skip
    load.add_argument("--duration", type=float, default=12.0, help="seconds of arrivals per rate")
    load.add_argument("--warmup-s", type=float, default=2.0, help="at half the lowest rate")
    load.add_argument("--drain", type=float, default=20.0, help="then wait so long for the rest")
    load.add_argument("--seed", type=int, default=7, help="no two loads get the same prompts")
    load.add_argument("--vocab", default="1000:120000", help="range of token ids")
    load.add_argument("--extra", default='{"return_token_ids": true}', help="JSON for each body")
    load.add_argument(
        "--client-processes", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 4)),
        help="that send; a client that is busy measures itself",
    )  # fmt: skip
    load.add_argument(
        "--batch", type=batch_of, metavar="IN/OUT",
        help="measure each rate again while requests of a batch run, with the same arrivals",
    )  # fmt: skip
    load.add_argument("--kill", choices=["prefill", "decode"], help="amid the last rate's arrivals")

    result = parser.add_argument_group("result")
    result.add_argument("--slo-ttft-ms", type=float, default=200.0, help="of 99 in 100 requests")
    result.add_argument("--slo-itl-ms", type=float, default=15.0, help="of 99 in 100 tokens")
    result.add_argument("--name", default="", help="of the result; default: goodput-ENGINE")
    result.add_argument(
        "--dump", action="store_true", help="add a row per request, a trace for `tandem plan`"
    )
    result.add_argument(
        "--beside", action="append", type=Path, default=[], metavar="FILE",
        help="JSON lines of a peer, or another result of this, for the table",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.load = args.load or [Workload.parse(_DEFAULT_LOAD)]
    return args


def engine_of(args: argparse.Namespace) -> str:
    if args.tag:
        return str(args.tag)
    transport = "" if args.kv_transports == "auto" else f"-{args.kv_transports}"
    killed = f"-kill-{args.kill}" if args.kill else ""
    return f"tandem-{args.nodes}{transport}{killed}"


def itl_objective_s(flags: list[str]) -> float:
    """Returns the objective between tokens that the flags give nodes; 0: none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--itl-objective-ms", type=float, default=0.0)
    known, _ = parser.parse_known_args(flags)
    return float(known.itl_objective_ms) / 1e3


def node_args(args: argparse.Namespace) -> list[str]:
    """Returns the flags of all nodes; what comes later wins."""
    longest = max(workload.n_in + workload.n_out for workload in args.load)
    return [
        *([] if args.checkpoint else ["--load-format", "dummy"]),
        *("--max-model-len", str(-(-longest // 1024) * 1024)),
        *("--block-size", "128", "--max-num-batched-tokens", str(_MAX_TOKENS)),
        "--no-enable-prefix-caching",
        *args.node_args.split(),
    ]
