#!/usr/bin/env python3
"""Measures how long one scrape of a large router keeps its event loop from everything else.

The router's own metrics in this process: tenants that have all called, nodes and models. Before
and after are one command: `--whole` makes the text in one piece, as the library does.

    python -m bench.router.scrape --tenants 10000 --nodes 500 --models 200
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import median

from prometheus_client import generate_latest
from starlette.requests import Request

from bench.record import write_result
from edge.http.exposition import Exposition
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.registry import NodeRegistry
from router.observe.metrics import RouterMetrics
from router.relay.known_labels import start_at_zero

_STATUSES = ("200", "429", "499")


def metrics_of(num_tenants: int, num_nodes: int, num_models: int) -> RouterMetrics:
    """Returns metrics in which everything that has a label has been counted."""
    nodes = NodeRegistry()
    half = num_nodes // 2
    roles = [NodeRole.PREFILL] * half + [NodeRole.DECODE] * (num_nodes - half)
    nodes.set_members(
        NodeAddress(role, f"10.0.{i >> 8}.{i & 255}", 80) for i, role in enumerate(roles)
    )
    tenants = [f"tenant-{i:05}" for i in range(num_tenants)]
    versions = [(f"model-{i}", "") for i in range(num_models)]
    metrics = RouterMetrics(nodes, lambda: tenants, lambda: versions)
    start_at_zero(metrics)
    for name in tenants:
        for status in _STATUSES:
            metrics.by_tenant.add((name,), status)
    for version in versions:
        metrics.by_model.add(version, "200")
        metrics.first_byte.observe(version, 0.1, None)
    return metrics


async def longest_silence(metrics: RouterMetrics, is_whole: bool) -> dict[str, float]:
    """Returns seconds: a scrape's, and the longest for which nothing else could run, of which
    others on a busy machine have a part; `computed`: this thread's alone."""
    gaps: list[tuple[float, float]] = []
    running = True

    async def heartbeat() -> None:
        last = _times()
        while running:
            await asyncio.sleep(0)
            now = _times()
            gaps.append((now[0] - last[0], now[1] - last[1]))
            last = now

    beating = asyncio.create_task(heartbeat())
    await asyncio.sleep(0.05)
    gaps.clear()
    began = time.perf_counter()
    if is_whole:
        size = len(generate_latest(metrics.registry))
    else:
        size = len(
            (
                await Exposition(metrics.registry).response(
                    Request({"type": "http", "headers": []})
                )
            ).body
        )
    took = time.perf_counter() - began
    await asyncio.sleep(0)
    running = False
    await beating
    silence_s, computed_s = (max(column) for column in zip(*gaps, strict=True))
    return {"scrape_s": took, "silence_s": silence_s, "computed_s": computed_s, "bytes": size}


def _times() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--whole", action="store_true", help="in one piece")
    parser.add_argument("--name", default="scrape", help="of the result file")
    args = parser.parse_args()
    metrics = metrics_of(args.tenants, args.nodes, args.models)
    rounds = [asyncio.run(longest_silence(metrics, args.whole)) for _ in range(args.rounds)]
    found = {name: median(each[name] for each in rounds) for name in rounds[0]}
    print(
        f"{found['bytes'] / 1e6:.2f} MB in {found['scrape_s']:.3f} s, longest silence "
        f"{1000 * found['silence_s']:.1f} ms, of which {1000 * found['computed_s']:.1f} ms computed"
    )
    write_result(args.name, {"case": vars(args), "medians": found, "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
