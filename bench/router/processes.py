"""Runs what benches of the router need around it: decode nodes that send tokens and nothing else,
the router in a process of its own, and clients that note how long each token was on its way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import uvloop

from router.config import RouterSettings
from router.garbage import settle
from router.server import RouterServer, bind
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NodeLoad
from tandem_pb.node_pb2_grpc import NodeStatusServicer, add_NodeStatusServicer_to_server

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


async def _send_steps(streams: set[TokenServer], step_s: float) -> None:
    """Sends every stream a token each step: one row after the other, without a pause."""
    start = time.monotonic()
    for step in range(1 << 60):
        await asyncio.sleep(max(0.0, start + step * step_s - time.monotonic()))
        for stream in tuple(streams):
            stream.send_event()


class _Status(NodeStatusServicer):
    """The status service of a decode node that is always well."""

    def Watch(self, request: object, context: grpc.ServicerContext) -> Iterator[NodeLoad]:
        sequence = 0
        while context.is_active():
            sequence += 1
            yield NodeLoad(
                node_id=f"bench-{id(self)}", role=NODE_ROLE_DECODE, epoch=1, sequence=sequence,
                model_name="bench",
            )  # fmt: skip
            time.sleep(0.25)


def run_token_server(ports: multiprocessing.Queue[int], step_s: float) -> None:
    """Serves until the process ends, as a decode node; puts the ports of gRPC and HTTP."""
    status = grpc.server(futures.ThreadPoolExecutor(4))
    add_NodeStatusServicer_to_server(_Status(), status)  # type: ignore[no-untyped-call]
    ports.put(status.add_insecure_port("127.0.0.1:0"))
    status.start()

    async def serve() -> None:
        streams: set[TokenServer] = set()
        server = await asyncio.get_running_loop().create_server(
            lambda: TokenServer(streams), "127.0.0.1", 0, backlog=4096
        )
        ports.put(server.sockets[0].getsockname()[1])
        await _send_steps(streams, step_s)

    uvloop.run(serve())


# The router -------------------------------------------------------------------------------------


def run_router(ports: multiprocessing.Queue[int], decode: str) -> None:
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    settings = RouterSettings(port=0, decode=decode, log_level="warning")
    listener = bind(settings.host, settings.port)
    server = RouterServer(settings, listener)
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


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Runs a service; yields its process and what it said when it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--port", "0", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = (json.loads(line) for line in process.stdout)
        ready = next((event for event in said if event["event"] == "ready"), None)
        if ready is None:
            raise SystemExit(f"{arguments[0]} did not start")
        yield process, ready
    finally:
        process.terminate()
        process.wait()


def port_of(ready: dict[str, Any]) -> int:
    """Returns the port of the API that a service has named."""
    return ready.get("port") or int(ready["address"].rpartition(":")[2])
