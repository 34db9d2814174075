#!/usr/bin/env python3
"""Measures what the router's relay of streams costs where decode nodes work in steps.

Processes on loopback: decode nodes that send one token to each of their streams in every step of
8 ms, all rows of a step at once as an engine does; the router; and a client. Each token carries the
time it was made, so the client sees how long it was on its way; the same client reads a node
directly for comparison. `floor` is a relay that copies bytes between two sockets and looks at
nothing: what a process with this event loop must pay at least. Short requests, one after the other,
say what each adds to a request.

    python -m bench.router.relay --tokens 5000,10000,20000 --nodes 2 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from typing import cast

import uvloop

from bench.arguments import parser_of
from bench.figures import distribution_ms
from bench.record import write_result
from bench.router.processes import (
    child,
    peak_rss_mib,
    request_times,
    run_router,
    run_token_server,
    stream_delays,
    wait_ready,
)
from bench.serving.process_tree import own_cpu_seconds

_STEP_S = 0.008
_RAMP_S = 0.5


# The floor --------------------------------------------------------------------------------------


class _Copier(asyncio.Protocol):
    """Is one side of a pair that copies what comes to the other side."""

    def __init__(self, target: int | None = None) -> None:
        self._target = target
        self.other: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._target is not None:
            self._dialing = asyncio.ensure_future(self._dial(self._target))

    async def _dial(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, other = await loop.create_connection(_Copier, "127.0.0.1", port)
        other.other, self.other = self.transport, other.transport
        self.other.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


def run_floor(ports: multiprocessing.Queue[int], node_ports: list[int]) -> None:
    async def serve() -> None:
        turns = iter(node_ports * (1 << 16))
        server = await asyncio.get_running_loop().create_server(
            lambda: _Copier(next(turns)), "127.0.0.1", 0, backlog=4096
        )
        ports.put(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(serve())


# Figures ----------------------------------------------------------------------------------------


async def _measure(
    args: argparse.Namespace, entries: list[int], pids: list[int], tokens: int
) -> dict[str, object]:
    num_streams = round(tokens * _STEP_S)
    max_tokens = round(args.seconds / _STEP_S)
    cpu, started = sum(map(own_cpu_seconds, pids)), time.monotonic()
    share = num_streams // len(entries)
    shares = [stream_delays(port, share, max_tokens, _RAMP_S) for port in entries]
    delays_s = [delay for found in await asyncio.gather(*shares) for delay in found]
    cpu, wall_s = sum(map(own_cpu_seconds, pids)) - cpu, time.monotonic() - started
    return {
        "streams": num_streams,
        "complete": len(delays_s) == num_streams * max_tokens,
        "tokens_per_s": round(len(delays_s) / wall_s),
        "token_ms": distribution_ms(delays_s),
        "cpu_us_per_token": round(cpu / len(delays_s) * 1e6, 1),
        "cores": round(cpu / wall_s, 3),
        "peak_rss_mib": max(map(peak_rss_mib, pids), default=0.0),
    }


async def _measure_all(
    args: argparse.Namespace, name: str, entries: list[int], pids: list[int]
) -> list[dict[str, object]]:
    await request_times(entries[0], 200)
    request_ms = distribution_ms(await request_times(entries[0], args.requests))
    rows = []
    for tokens in args.tokens:
        found = await _measure(args, entries, pids, tokens)
        rows.append({"relay": name, "request_ms": request_ms, **found})
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def _measure_routers(
    args: argparse.Namespace, entries: list[int], pids: list[int]
) -> list[dict[str, object]]:
    for port in entries:
        await wait_ready(port)
    return await _measure_all(args, f"routers: {len(entries)}", entries, pids)


@contextlib.contextmanager
def _nodes(ports: multiprocessing.Queue[int], count: int) -> Iterator[list[tuple[int, int]]]:
    """Runs decode nodes; yields the ports of each: HTTP, gRPC."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            stack.enter_context(child(run_token_server, ports, _STEP_S))
            status_port, http_port = ports.get(), ports.get()
            found.append((http_port, status_port))
        yield found


def main() -> int:
    parser = parser_of(__doc__, "router_relay")
    parser.add_argument("--tokens", default="5000,10000,20000", help="tokens per second, of all")
    parser.add_argument("--nodes", type=int, default=2, help="decode nodes")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each stream")
    parser.add_argument("--requests", type=int, default=1000, help="short requests to time")
    parser.add_argument("--routers", type=int, default=1, help="routers that share the streams")
    parser.add_argument("--relays", default="direct,floor,router", help="what to measure")
    args = parser.parse_args()
    args.tokens = [int(number) for number in args.tokens.split(",")]
    ports: multiprocessing.Queue[int] = multiprocessing.get_context("spawn").Queue()
    rows: list[dict[str, object]] = []
    wanted = args.relays.split(",")
    with _nodes(ports, args.nodes) as nodes:
        if "direct" in wanted:
            rows += uvloop.run(_measure_all(args, "direct", [nodes[0][0]], []))
        if "floor" in wanted:
            with child(run_floor, ports, [http for http, _ in nodes]) as process:
                assert process.pid is not None
                rows += uvloop.run(_measure_all(args, "floor", [ports.get()], [process.pid]))
        if "router" in wanted:
            decode = ",".join(f"127.0.0.1:{http}/{status}" for http, status in nodes)
            with contextlib.ExitStack() as stack:
                entries, pids = [], []
                for _ in range(args.routers):
                    process = stack.enter_context(child(run_router, ports, decode))
                    assert process.pid is not None
                    pids.append(process.pid)
                    entries.append(ports.get())
                rows += uvloop.run(_measure_routers(args, entries, pids))
    print(f"written: {write_result(args.name, rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
