#!/usr/bin/env python3
"""Measures what floods of valid requests cost others: how long another client waits, and memory.

The router runs alone. Attackers are a process of their own, with 60 connections for some seconds;
another client asks for /health all the while and after, one request after the other.

    python -m bench.router.floods --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time

from bench.record import write_result
from bench.router.overhead import child, cpu_seconds, peak_rss_mib, run_router

_NUM_CONNECTIONS = 60
_GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
FLOODS = {
    "pipelined requests": (b"", _GET * 4000),
    "chunks of one byte": (_CHUNKED, b"1\r\n \r\n" * 20_000),
    "endless trailers": (_CHUNKED + b"0\r\n", b"a: b\r\n" * 20_000),
}
"""Names what is sent once on each connection, and again and again."""


async def _attack(port: int, first: bytes, again: bytes, until: float) -> None:
    """Sends without reading, begins anew where it is cut off, and hangs up each second."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                async with asyncio.timeout(1.0):
                    writer.write(first)
                    while not writer.is_closing():
                        writer.write(again)
                        await writer.drain()
            finally:
                writer.transport.abort()


def run_attack(port: int, name: str, seconds: float) -> None:
    async def attack() -> None:
        first, again = FLOODS[name]
        until = time.monotonic() + seconds
        attacks = (_attack(port, first, again, until) for _ in range(_NUM_CONNECTIONS))
        await asyncio.gather(*attacks)

    asyncio.run(attack())


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError):
            return await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.05)
    raise SystemExit("the router did not begin to listen")


async def _waits(port: int, seconds: float) -> list[float]:
    """Asks again and again, at most each 10 ms; returns the seconds that each answer took."""
    reader, writer = await _connect(port)
    waits = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.monotonic()
        writer.write(_GET)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        waits.append(time.monotonic() - started)
        await asyncio.sleep(0.01)
    writer.close()
    return waits


def _measure(name: str, seconds: float) -> dict[str, object]:
    ports: multiprocessing.Queue[int] = multiprocessing.get_context("spawn").Queue()
    with child(run_router, ports, "", "own") as router:
        port, pid = ports.get(), router.pid
        assert pid is not None
        asyncio.run(_waits(port, 1.0))
        rss, cpu = peak_rss_mib(pid), cpu_seconds(pid)
        with child(run_attack, port, name, seconds):
            waits = sorted(asyncio.run(_waits(port, seconds + 2)))
        return {
            "flood": name,
            "wait_p50_ms": round(waits[len(waits) // 2] * 1e3, 1),
            "wait_p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 1),
            "wait_max_ms": round(waits[-1] * 1e3, 1),
            "grown_mib": round(peak_rss_mib(pid) - rss, 1),
            "router_cpu_s": round(cpu_seconds(pid) - cpu, 2),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each flood")
    parser.add_argument("--floods", default=",".join(FLOODS), help="which")
    parser.add_argument("--name", default="router_floods", help="name of the result file")
    args = parser.parse_args()
    rows = []
    for name in args.floods.split(","):
        rows.append(_measure(name, args.seconds))
        print(json.dumps(rows[-1]), flush=True)
    print(f"written: {write_result(args.name, rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
