#!/usr/bin/env python3
"""Measures prompts whose prefix a peer has: first token, computed here and pulled from the peer.

Two prefill nodes as they are deployed, a GPU each. One computes prompts of a prefix and a short
tail; then the other is asked for the same prefixes with other tails, and told who holds them: it
pulls the prefix and computes the tail. Each way of moving KV has nodes of its own. The prompts that
the second node computed itself, with prefixes of their own, are what to compare with. Both are
asked by gRPC for the first token alone, as decode nodes ask, so no decode node takes part.

    python -m bench.kv.peer_prefix                                 two GPUs, Llama 3.1 8B's shape
    python -m bench.kv.peer_prefix --ways stream                   over gRPC alone
    python -m bench.kv.peer_prefix --device cpu --model MODEL --tokens 512

Standard error shows each turn: what the node decided and why, from its log at debug, what it took,
and how many tokens of the prefix came. Turns 0 and 1 warm up: their pulls are on trust.

Goals on two H200s, 8k tokens: 60 ms by CUDA IPC, 130 ms over gRPC, never slower than computed.
Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass

import grpc

from bench.engine.models.shapes import SHAPES
from bench.kv.host_tier import summary
from bench.record import write_result
from bench.serving.pd_cluster import model_folder
from bench.serving.report import Figures
from cli.cluster import free_ports
from cli.supervisor import Listener, Service, ServiceSpec, Supervisor
from engine.contracts.request_spec import RequestSpec, encode_spec
from engine.contracts.sampling_params import SamplingParams
from tandem_pb import node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc

WAYS = {"cuda_ipc": "cuda_ipc,stream", "stream": "stream", "nixl": "nixl,stream"}
_PATIENCE_S = 60.0
_WARM_UP = 2
_DECISION = "prefix of "
"""How lines begin with which a node explains itself (engine/sched/arrivals/pull_rates.py)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds what a node said of a prompt."""

    ms: float
    num_cached_tokens: int


class PrefillNode:
    """A prefill node, asked for first tokens."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.address = spec.endpoint.removeprefix("grpc://")
        self._channel = grpc.aio.insecure_channel(self.address)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)  # type: ignore[no-untyped-call]
        self._epoch = 0

    async def connect(self) -> None:
        status = node_pb2_grpc.NodeStatusStub(self._channel)  # type: ignore[no-untyped-call]
        async for load in status.Watch(node_pb2.WatchRequest()):
            self._epoch = load.epoch
            return

    async def ask(self, prompt: list[int], holder: str = "") -> Answer:
        """Returns when the first token is here. `holder`: address of a node that has the prefix."""
        spec = RequestSpec(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        request = prefill_pb2.PrefillRequest(
            request_id=uuid.uuid4().hex,
            transfer_id=uuid.uuid4().hex,
            expected_epoch=self._epoch,
            prompt_token_ids=prompt,
            spec=encode_spec(spec),
            first_token_only=True,
            prefix_holder=f"prefill/{holder}" if holder else "",
        )
        at, found = time.perf_counter(), None
        async with asyncio.timeout(_PATIENCE_S):
            async for event in self._stub.Prefill(request):
                if event.WhichOneof("event") == "failed":
                    raise SystemExit(f"the prompt failed: {event.failed.message}")
                if event.WhichOneof("event") == "first_token":
                    ms = (time.perf_counter() - at) * 1e3
                    found = Answer(ms, event.first_token.num_cached_tokens)
        assert found is not None
        return found

    async def close(self) -> None:
        await self._channel.close()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def measure(holder: PrefillNode, node: PrefillNode, args: argparse.Namespace) -> Figures:
    """Returns the figures of one way."""
    await asyncio.gather(holder.connect(), node.connect())
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, args.vocab) for _ in range(count)]

    computed, pulled = list[Answer](), list[Answer]()
    for i in range(args.prompts + _WARM_UP):
        prefix = tokens(args.tokens)
        own = await node.ask(tokens(args.tokens + args.tail))
        await holder.ask(prefix + tokens(args.tail))
        got = await node.ask(prefix + tokens(args.tail), holder.address)
        say(
            f"turn {i}: computed {own.ms:.1f} ms; asked to pull {got.ms:.1f} ms, "
            f"{got.num_cached_tokens} of {args.tokens} tokens came"
        )
        if i >= _WARM_UP:
            computed.append(own)
            pulled.append(got)
    ms = [one.ms for one in pulled if one.num_cached_tokens >= args.tokens]
    return {
        "first token, ms": {
            "computed": summary([one.ms for one in computed]),
            "pulled": summary(ms),
            "asked to pull": summary([one.ms for one in pulled]),
        },
        "share of prefix tokens that were pulled": round(
            sum(one.num_cached_tokens for one in pulled) / len(pulled) / args.tokens, 3
        ),
    }


def node_specs(way: str, model: str, args: argparse.Namespace) -> list[ServiceSpec]:
    """Returns the holder and the node that pulls, with one way of moving KV."""
    flags = [
        *("--model", model, "--device", args.device, "--kv-transports", WAYS[way]),
        *([] if args.model else ["--load-format", "dummy"]),
        *("--enable-prefix-caching", "--kv-share-prefixes", "auto", "--log-level", "debug"),
        *("--kv-cache-memory-bytes", str(args.cache_bytes)),
        *("--max-model-len", str(-(-(args.tokens + args.tail + 1) // 1024) * 1024)),
        *(
            ("--block-size", "128", "--max-num-batched-tokens", "8192")
            if args.device == "cuda"
            else ()
        ),
        *args.node_args.split(),
    ]
    specs = []
    for index in range(2):
        port, metrics_port = free_ports(2)
        ports = ["--port", str(port), "--metrics-port", str(metrics_port)]
        gpu = ["--first-gpu", str(index)] if args.device == "cuda" else []
        argv = (sys.executable, "-m", "prefill_node", *flags, *gpu, *ports)
        specs.append(ServiceSpec(f"{way}-{index}", argv, f"grpc://127.0.0.1:{port}"))
    return specs


async def run(model: str, args: argparse.Namespace) -> Figures:
    """Starts all nodes at once: most of the time goes there."""
    pairs = {way: node_specs(way, model, args) for way in args.ways}
    lines: list[str] = []

    def on_log(service: Service, line: str) -> None:
        if _DECISION in line:
            say(f"  {service.spec.name}: {line[line.index(_DECISION) :]}")
        elif "DEBUG" not in line:
            lines.append(f"{service.spec.name}: {line}")

    listener = Listener(on_log=on_log)
    supervisor = Supervisor([spec for pair in pairs.values() for spec in pair], listener)
    figures: Figures = {}
    at = time.monotonic()
    try:
        await supervisor.start()
        say(f"ready after {time.monotonic() - at:.0f} s")
        for way, pair in pairs.items():
            holder, node = (PrefillNode(spec) for spec in pair)
            figures[way] = await measure(holder, node, args)
            say(f"{way} {figures[way]}")
            await asyncio.gather(holder.close(), node.close())
    except BaseException:
        say("\n".join(lines[-60:]))
        raise
    finally:
        await supervisor.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: --shape with random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=["cuda_ipc", "stream"])
    parser.add_argument("--tokens", type=int, default=8192, help="of a prefix")
    parser.add_argument("--tail", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are below")
    parser.add_argument("--cache-bytes", type=int, default=20 << 30, help="of each node")
    parser.add_argument("--node-args", default="", help="more flags for every node, in one word")
    parser.add_argument("--name", default="peer_prefix", help="of the result; empty: none")
    args = parser.parse_args()
    folder = nullcontext(args.model) if args.model else model_folder(args.shape)
    with folder as model:
        figures = asyncio.run(run(str(model), args))
    print(json.dumps(figures, indent=1))
    if args.name:
        settings = {name: value for name, value in vars(args).items() if name != "name"}
        print("written:", write_result(args.name, {"settings": settings, "ways": figures}))


if __name__ == "__main__":
    main()
