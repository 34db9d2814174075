"""Clients that read streams as cheaply as Python can, and note when each event came.

    1. `StreamClients(...)`; `run` opens `count` connections and keeps one request open on each
    2. what came is in `streams`, by the ids that requests had

Meant for a process of its own, beside the server that is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from edge.http import headers as names

_EVENT = b"data: {"
_TOKENS = re.compile(rb'"tokens",0,\[([0-9,]+)\]')
"""The tokens of an event, in the journal of a router."""
_EVENT_END = b"\n\n"
_HEAD, _OK = b"HTTP/1.1 ", b"200"
_END = b"0\r\n\r\n"


class Stream(msgspec.Struct):
    """Is one answer: when each of its events came, in CLOCK_MONOTONIC seconds."""

    request_id: str
    sent_at: float
    times: list[float]
    is_complete: bool = False


class StreamClients:
    """Keeps `count` streams open. `body` is what all requests ask for; those that come first have
    lengths of their own, so that later ones do not begin all at once."""

    def __init__(
        self, address: tuple[str, int], path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        self._address = address
        self._path = path
        self._headers = headers
        self._is_routed = names.JOURNAL in headers
        self._body = body
        self._names = itertools.count()
        self.streams: list[Stream] = []

    async def run(self, count: int, seconds: float) -> None:
        """Returns when `seconds` are over; what is open then is cut off."""
        loop = asyncio.get_running_loop()
        longest = int(self._body["max_tokens"])
        clients = []
        for number in range(count):
            first = max(1, longest * (number + 1) // count)
            lengths = itertools.chain((first,), itertools.repeat(longest))
            _, client = await loop.create_connection(
                lambda lengths=lengths: _Client(self, lengths), *self._address
            )
            clients.append(client)
        await asyncio.sleep(seconds)
        for client in clients:
            client.close()

    def num_tokens(self, events: bytes) -> int:
        """Returns how many tokens came. Without a journal each event has to have one."""
        if self._is_routed:
            return sum(found[1].count(b",") + 1 for found in _TOKENS.finditer(events))
        return events.count(_EVENT)

    def next_request(self, num_tokens: int) -> tuple[Stream, bytes]:
        name = f"s{next(self._names)}"
        stream = Stream(name, 0.0, [])
        self.streams.append(stream)
        body = json.dumps({**self._body, "max_tokens": num_tokens}).encode()
        head = {
            "host": "node",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": name,
            **self._headers,
        }
        lines = "".join(f"{key}: {value}\r\n" for key, value in head.items())
        return stream, f"POST {self._path} HTTP/1.1\r\n{lines}\r\n".encode() + body


class _Client(asyncio.Protocol):
    """Is one connection, with one request after the other."""

    def __init__(self, clients: StreamClients, lengths: Iterator[int]) -> None:
        self._clients = clients
        self._lengths = lengths
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        assert self._stream is not None
        if not self._stream.times and data.startswith(_HEAD) and not data.startswith(_OK, 9):
            raise RuntimeError(data.decode())
        data = self._tail + data
        at = data.rfind(_EVENT_END)
        whole, self._tail = (data[:at], data[at:]) if at >= 0 else (b"", data)
        if count := self._clients.num_tokens(whole):
            self._stream.times.extend([now] * count)
        if data.endswith(_END):
            self._stream.is_complete = True
            self._tail = b""
            self._ask()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _ask(self) -> None:
        assert self._transport is not None
        self._stream, request = self._clients.next_request(next(self._lengths))
        self._stream.sent_at = time.monotonic()
        self._transport.write(request)
