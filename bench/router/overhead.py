#!/usr/bin/env python3
"""Measures what the router costs: added latency, processor time and memory, with many streams at
once.

Three processes on loopback: a token server that sends one event to every stream at a fixed rate,
the router, and a client. Each event carries the time it was made, so the client sees how long it
was on its way; the same client asks the token server directly for comparison. The router is run
with each HTTP client in turn (`own`, which it uses, `aiohttp` and `httpx`).

    python -m bench.router.overhead --streams 100,500 --rate 20 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import uvloop

from bench.record import write_result
from bench.router.http_clients import make_transport
from bench.router.status_stub import serve_status
from router.app import OuterWorld
from router.config import RouterSettings
from router.garbage import settle
from router.server import RouterServer, bind

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
_JOURNAL = b"x-tandem-journal:"
_PADDING = b'"id": "cmpl-000000000000", "object": "text_completion", "model": "bench", '
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_MARK = b'"made": '


# The token server -------------------------------------------------------------------------------


class TokenServer(asyncio.Protocol):
    """Just enough HTTP to stream events cheaply, so that the router is what is measured. A client
    that asks for a journal gets one, as from a decode node.

    The body's `max_tokens` says how many events; 0 is answered with a short JSON body.
    """

    def __init__(self, streams: set[TokenServer]) -> None:
        self._streams = streams
        self._received = b""
        self._missing: int | None = None
        """Bytes of the body that have not come yet; None while the head has not."""
        self._keeps_journal = False
        self._number = 0
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)

    def data_received(self, data: bytes) -> None:
        """Keeps the beginning of a body only, so that a large one costs nothing here."""
        if self._missing is None:
            self._received += data
            head, separator, body = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            self._missing = length - len(body)
            self._keeps_journal = _JOURNAL in head.lower()
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            wanted = _MAX_TOKENS.search(self._received)
            self._received, self._missing = b"", None
            self._answer(int(wanted[1]) if wanted else 1)

    def _answer(self, max_tokens: int) -> None:
        if max_tokens == 0:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"
            self._transport.write(head + b"{}")
            return
        self.left = max_tokens
        self._number = 0
        journal = _JOURNAL + b" 0\r\n" if self._keeps_journal else b""
        self._transport.write(_HEAD + journal + b"\r\n")
        self._streams.add(self)

    def send_event(self) -> None:
        event = b"data: {%b%b%d}\n\n" % (_PADDING, _MARK, time.monotonic_ns())
        if self._keeps_journal:
            event = b': %d ["tokens",0,[%d]]\n%b' % (self._number, 1000 + self._number, event)
            self._number += 1
        self.left -= 1
        if self.left == 0:
            self._streams.discard(self)
            self._transport.write(_chunk(event) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            self._transport.write(_chunk(event))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _send_tokens(streams: set[TokenServer], rate: float) -> None:
    """Sends every stream `rate` events a second; streams take turns evenly within a period."""
    period_s, num_slots = 1 / rate, 50
    slot = 0
    start = time.monotonic()
    for step in range(1 << 60):
        await asyncio.sleep(max(0.0, start + step * period_s / num_slots - time.monotonic()))
        for stream in [s for s in streams if id(s) // 64 % num_slots == slot]:
            stream.send_event()
        slot = (slot + 1) % num_slots


def run_token_server(ports: multiprocessing.Queue[int], rate: float) -> None:
    async def serve() -> None:
        streams: set[TokenServer] = set()
        server = await asyncio.get_running_loop().create_server(
            lambda: TokenServer(streams), "127.0.0.1", 0, backlog=4096
        )
        ports.put(server.sockets[0].getsockname()[1])
        await _send_tokens(streams, rate)

    ports.put(serve_status())
    uvloop.run(serve())


# The router with each HTTP client ---------------------------------------------------------------


def run_router(ports: multiprocessing.Queue[int], decode: str, client: str) -> None:
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    settings = RouterSettings(port=0, decode=decode, log_level="warning")
    listener = bind(settings.host, settings.port)
    server = RouterServer(settings, listener, OuterWorld(transport=make_transport(client)))
    ports.put(listener.getsockname()[1])
    settle()
    uvloop.run(server.run_until_drained())


# The client -------------------------------------------------------------------------------------


class Reader(asyncio.Protocol):
    """Sends one request and notes how long each event was on its way."""

    def __init__(self, request: bytes, delays_s: list[float]) -> None:
        self._request = request
        self._delays_s = delays_s
        self._rest = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._rest + data
        *marked, _ = data.split(b"}\n\n")
        for piece in marked:
            self._delays_s.append((now - int(piece.rpartition(_MARK)[2])) * 1e-9)
        self._rest = data[data.rfind(b"}\n\n") + 3 :] if marked else data
        if self._rest.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the connection was closed early"))


def _request(max_tokens: int) -> bytes:
    body = json.dumps({"model": "bench", "prompt": "x " * 100, "max_tokens": max_tokens}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def stream_delays(port: int, num_streams: int, max_tokens: int, ramp_s: float) -> list[float]:
    """Seconds on the way, of every event of `num_streams` streams, begun within `ramp_s`."""
    delays_s: list[float] = []
    readers = []
    started = time.monotonic()
    for index in range(num_streams):
        due = started + ramp_s * index / num_streams
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        _, reader = await asyncio.get_running_loop().create_connection(
            lambda: Reader(_request(max_tokens), delays_s), "127.0.0.1", port
        )
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    return delays_s


async def request_times(port: int, count: int) -> list[float]:
    """Seconds of each of `count` short requests, one after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        writer.write(_request(0))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(2)
        times.append(time.perf_counter() - started)
    writer.close()
    return times


# Figures ----------------------------------------------------------------------------------------


def percentiles_ms(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49] * 1e3, 3), "p99": round(cuts[98] * 1e3, 3)}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [kib] = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return round(kib / 1024, 1)


@contextlib.contextmanager
def child(target: object, *args: object) -> Iterator[multiprocessing.process.BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


async def wait_ready(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(400):
            with contextlib.suppress(httpx.TransportError):
                response = await client.get(f"http://127.0.0.1:{port}/ready")
                if response.status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise SystemExit("the router did not become ready")


async def measure(
    args: argparse.Namespace, token_port: int, router_port: int, router_pid: int
) -> dict[str, object]:
    await wait_ready(router_port)
    await request_times(router_port, 200)
    direct = percentiles_ms(await request_times(token_port, args.requests))
    through = percentiles_ms(await request_times(router_port, args.requests))
    cpu = cpu_seconds(router_pid)
    await request_times(router_port, args.requests)
    result: dict[str, object] = {
        "request_direct_ms": direct,
        "request_through_ms": through,
        "request_added_p50_ms": round(through["p50"] - direct["p50"], 3),
        "cpu_us_per_request": round((cpu_seconds(router_pid) - cpu) / args.requests * 1e6, 1),
        "rss_idle_mib": peak_rss_mib(router_pid),
        "streams": [],
    }
    rows = []
    for num_streams in args.streams:
        rows.append(await _measure_streams(args, token_port, router_port, router_pid, num_streams))
        print(json.dumps(rows[-1]), flush=True)
    result["streams"] = rows
    return result


async def _measure_streams(
    args: argparse.Namespace, token_port: int, router_port: int, router_pid: int, num_streams: int
) -> dict[str, object]:
    max_tokens = round(args.seconds * args.rate)
    direct = percentiles_ms(await stream_delays(token_port, num_streams, max_tokens, args.ramp))
    cpu, started = cpu_seconds(router_pid), time.monotonic()
    delays_s = await stream_delays(router_port, num_streams, max_tokens, args.ramp)
    cpu, wall_s = cpu_seconds(router_pid) - cpu, time.monotonic() - started
    through = percentiles_ms(delays_s)
    return {
        "streams": num_streams,
        "events": len(delays_s),
        "complete": len(delays_s) == num_streams * max_tokens,
        "event_direct_ms": direct,
        "event_through_ms": through,
        "event_added_ms": {q: round(through[q] - direct[q], 3) for q in through},
        "router_cpu_us_per_event": round(cpu / len(delays_s) * 1e6, 1),
        "router_cores": round(cpu / wall_s, 3),
        "router_peak_rss_mib": peak_rss_mib(router_pid),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="100,500", help="numbers of concurrent streams")
    parser.add_argument("--rate", type=float, default=20.0, help="events per second and stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each stream")
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds over which streams begin")
    parser.add_argument("--requests", type=int, default=1000, help="short requests to time")
    parser.add_argument("--clients", default="own,aiohttp,httpx", help="HTTP clients to compare")
    parser.add_argument("--name", default="router_overhead", help="name of the result file")
    args = parser.parse_args()
    args.streams = [int(number) for number in args.streams.split(",")]
    ports: multiprocessing.Queue[int] = multiprocessing.get_context("spawn").Queue()
    figures = {}
    with child(run_token_server, ports, args.rate):
        status_port, token_port = ports.get(), ports.get()
        for client in args.clients.split(","):
            print(f"{client}:", flush=True)
            decode = f"127.0.0.1:{token_port}/{status_port}"
            with child(run_router, ports, decode, client) as process:
                assert process.pid is not None
                measured = measure(args, token_port, ports.get(), process.pid)
                figures[client] = uvloop.run(measured)
            summary = {k: v for k, v in figures[client].items() if k != "streams"}
            print(json.dumps(summary), flush=True)
    print(f"written: {write_result(args.name, figures).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
