#!/usr/bin/env python3
"""Lets a stream pause for 70 s before its first token and between two, through each proxy at its
default settings, with keep-alives at their default and without.

    PYTHONPATH=. python tests/proxies/long_pause.py        # 3 minutes; bench/results/proxies.json
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import aiohttp

from bench.record import write_result
from router.config import RouterSettings
from tests.proxies.proxies import ENVOY, NAMES, find_proxy, running_proxy
from tests.proxies.streams import PausingNode, read_stream
from tests.router.cluster import run_cluster

PAUSE_S = 70.0
PROXIES = (*NAMES, ENVOY)


async def measure(folder: Path) -> list[dict[str, object]]:
    node = PausingNode(PAUSE_S)
    timeout = aiohttp.ClientTimeout(total=None)
    default_s = RouterSettings().sse_keepalive_s

    async def ask(name: str, keepalive_s: float, router: str) -> dict[str, object]:
        async with running_proxy(name, folder, router) as url:
            seen = asdict(await read_stream(client, url))
        seen["num_data_bytes"] = len(seen.pop("data"))
        return {"proxy": version(name), "sse_keepalive_s": keepalive_s, **seen}

    async with run_cluster() as cluster, aiohttp.ClientSession(timeout=timeout) as client:
        decode = await cluster.decode(handler=node.answer)
        routers = {
            limit_s: await cluster.router(decode, sse_keepalive_s=limit_s)
            for limit_s in (default_s, 0.0)
        }
        return await asyncio.gather(
            *(ask(name, limit_s, one.url) for limit_s, one in routers.items() for name in PROXIES)
        )


def version(name: str) -> str:
    binary = find_proxy(name)
    assert binary is not None
    asked = [binary, {"caddy": "version", ENVOY: "--version"}.get(name, "-v")]
    said = subprocess.run(asked, capture_output=True, text=True, check=True)
    found = re.search(r"\b\d+(\.\d+)+", said.stdout + said.stderr)
    return f"{name} {found[0] if found else '?'}"


def main() -> None:
    if not all(map(find_proxy, PROXIES)):
        sys.exit("nginx, haproxy, caddy and envoy are not all here: make proxies")
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder)))
    for row in rows:
        print(row)
    write_result("proxies", rows)


if __name__ == "__main__":
    main()
