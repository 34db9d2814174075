#!/usr/bin/env python3
"""Measures how long a scrape of a large router, or a page of its status, keeps its event loop from
streams: the longest pause between two turns of the loop, in processor time of this process, since
other work on the machine must not count.

    python -m bench.router.scrapes                  # 10,000 tenants, 500 nodes, 200 models
    python -m bench.router.scrapes --tenants 100 --nodes 10 --models 2

No request is answered and no node exists: reports are given to the router as if nodes had sent
them, and every tenant and model has had answers. Goal: no pause above 20 ms. Results:
bench/results/router_scrapes.json.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request

from bench.arguments import parser_of
from bench.figures import distribution_ms
from bench.record import write_result
from edge.http.exposition import Exposition
from edge.program import settle
from router.app import OuterWorld, Services, make_services
from router.config import RouterSettings
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.report import NodeReport, NodeTotals

_STATUSES = ("200", "400", "429", "499", "500", "503")


def key_file(folder: Path, count: int) -> Path:
    """Writes the keys of `count` tenants."""
    path = folder / "tenants.toml"
    with path.open("w") as file:
        for number in range(count):
            digest = hashlib.sha256(b"key of tenant %06d, long enough" % number).hexdigest()
            file.write(f'[[tenants]]\nname = "tenant-{number:05d}"\nkeys = ["sha256:{digest}"]\n')
    return path


def nodes_of(args: argparse.Namespace) -> list[NodeAddress]:
    hosts = [f"10.0.{number // 250}.{number % 250}" for number in range(args.nodes)]
    return [
        NodeAddress(NodeRole.PREFILL, f"{host}:9100", f"{host}:9100")
        if number % 2
        else NodeAddress(NodeRole.DECODE, f"{host}:8100", f"{host}:9100")
        for number, host in enumerate(hosts)
    ]


def fill(services: Services, args: argparse.Namespace) -> None:
    """Has nodes report, and counts answers for every tenant, model and node."""
    services.registry.set_members(nodes_of(args))
    for number, node in enumerate(services.registry.all_nodes()):
        report = NodeReport(
            node_id=f"node-{number}", role=node.address.role, epoch=1, sequence=1,
            num_total_blocks=1000, num_free_blocks=number % 1000, block_size=64,
            model_name=f"model-{number % args.models}", version="0.2.0",
            fingerprint=f"{number % args.models // 2:064x}",
            host_name=f"tandem-decode-{number:010d}", totals=NodeTotals(generation_tokens=number),
        )  # fmt: skip
        services.registry.apply_report(node.address, report)
    metrics = services.metrics
    for status in _STATUSES:
        for number in range(args.tenants):
            metrics.by_tenant.add((f"tenant-{number:05d}",), status)
        for number in range(args.models):
            metrics.by_model.add((f"model-{number}", f"model-{number}"), status)
    services.sources.sample()


async def pauses_during(work: Callable[[], Awaitable[object]]) -> tuple[list[float], float]:
    """Returns the processor seconds of each turn of the loop while `work` runs, and their sum."""
    found, task = list[float](), asyncio.ensure_future(work())
    began = at = time.process_time()
    while not task.done():
        await asyncio.sleep(0)
        now = time.process_time()
        found.append(now - at)
        at = now
    await task
    return found, time.process_time() - began


async def measure(args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        settings = RouterSettings(
            api_key_file=key_file(Path(folder), args.tenants),
            decode="127.0.0.1:1/2",
            _cli_parse_args=[],
        )
        services = make_services(settings, OuterWorld())
    fill(services, args)
    settle()
    request = Request({"type": "http", "headers": []})
    exposition = Exposition(services.metrics.registry)
    size = len((await exposition.response(request)).body)
    figures: dict[str, object] = {"scrape, MB": round(size / 1e6, 2)}
    for name, work in (
        ("scrape", lambda: exposition.response(request)),
        ("status", services.feed.document),
    ):
        turns, total = list[float](), list[float]()
        for _ in range(args.turns):
            found, seconds = await pauses_during(work)
            turns += found
            total.append(seconds)
        figures[f"{name}, ms"] = distribution_ms(total)
        figures[f"{name}, ms of a turn of the loop"] = distribution_ms(turns)
    return figures


def main() -> None:
    parser = parser_of(__doc__, "router_scrapes")
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    print(json.dumps(figures, indent=1))
    if args.name:
        print(write_result(args.name, figures))


if __name__ == "__main__":
    main()
