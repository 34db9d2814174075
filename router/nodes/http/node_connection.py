"""Is one HTTP/1.1 connection to a node, on which one answer after the other comes.

1. idle      connected; bytes that nothing asked for end it
2. asked     a request is written. Of one that is answered early the rest is not written
3. answered  `router.nodes.http.http_answer` parses what comes
4. idle      again, when the answer is whole and both sides keep the connection; else 5
5. closed    all that await an answer get `NodeLost`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from router.errors import NodeLost
from router.nodes.http.http_answer import HttpAnswer

_PIECE_BYTES = 256 << 10
"""Larger requests are written in pieces, so that copying one does not hold up the others."""


class NodeConnection(asyncio.Protocol):
    """`read_timeout_s` bounds a silence of the node that is waited for. `on_idle` is called when
    another request may be sent, `on_closed` at the end."""

    def __init__(
        self,
        read_timeout_s: float,
        on_idle: Callable[[NodeConnection], None],
        on_closed: Callable[[NodeConnection], None],
    ) -> None:
        self._read_timeout_s = read_timeout_s
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._answer: HttpAnswer | None = None
        self._is_sending = False
        self._is_reading = True
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def ask(
        self, method: str, path: str, host: str, headers: Mapping[str, str], body: bytes
    ) -> HttpAnswer:
        """Sends a request; returns when the head of its answer is here. Must be idle. Raises
        `NodeLost`."""
        head = _head(method, path, host, headers, len(body))
        answer = self._answer = HttpAnswer(self, self._read_timeout_s)
        try:
            await self._send(head, body, answer)
            await answer.wait_for_head()
        except BaseException:
            answer.close()
            raise
        return answer

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def ended(self, *, is_kept: bool) -> None:
        """Is called by the answer when it is whole, or given up."""
        self._answer = None
        self._may_write.set()
        if not is_kept or self._is_sending or self._transport.is_closing():
            self._transport.abort()
            return
        self.read_on()
        self._on_idle(self)

    def head_came(self) -> None:
        """Is called by the answer: what is not sent of its request is not wanted."""
        self._may_write.set()

    def stop_reading(self) -> None:
        if self._is_reading and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def read_on(self) -> None:
        if not self._is_reading and not self._transport.is_closing():
            self._is_reading = True
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self._transport.abort()
        else:
            self._answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._answer = self._answer, None
        self._may_write.set()
        if answer is not None:
            answer.connection_ended(exc)
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def _send(self, head: bytes, body: bytes, answer: HttpAnswer) -> None:
        if len(body) <= _PIECE_BYTES:
            self._transport.write(head + body)
            return
        self._is_sending = True
        self._transport.write(head)
        rest = memoryview(body)
        while rest and answer.is_awaited:
            self._transport.write(rest[:_PIECE_BYTES])
            rest = rest[_PIECE_BYTES:]
            await self._may_write.wait()
        self._is_sending = bool(rest)


def _head(method: str, path: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length or method != "GET":
        lines.append(f"content-length: {length}")
    if any("\r" in line or "\n" in line or "\0" in line for line in lines):
        raise NodeLost("a header of the request has a line end in it")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
