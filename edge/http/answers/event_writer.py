"""Writes an answer that comes in pieces, without a task between what makes a piece and its client.

1. `open_writer`    nothing is sent. The status is still the caller's, unless a comment begins
2. `write`          the first piece sends the head. A piece is with the connection when the call
                    returns, and nothing is awaited. Where the connection can be written to directly
                    (`edge.http.connection.guarded_protocol`), pieces go past the layers of
                    the application: those have to do with heads
3. a client that reads slowly: what it has no room for waits here, and a task sends it when it can.
   Nothing else waits. When the client takes nothing for `send_timeout_s`, the task that has opened
   the writer gets TimeoutError
4. `end`            waits until all is sent

It shows signs of life, as `edge.http.answers.heartbeats` asks of it: comments between whole pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Send

from edge.http.answers.heartbeats import KEEP_ALIVE, start_message
from edge.http.event_loop.limited_wait import rest_of

WriteDirectly = Callable[[bytes], bool]
"""Writes a piece of a body to its connection. Returns False if that has to be sent instead."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Says which `comment` an answer gets after `interval_s` of silence; 0: none. `head`: an answer
    may begin with one, under these headers; None: it waits until the answer has begun."""

    interval_s: float = 0.0
    comment: bytes = KEEP_ALIVE
    head: Mapping[str, str] | None = None


class EventWriter:
    """Use `open_writer`. `headers` are asked for with the first piece."""

    def __init__(
        self,
        send: Send,
        limit: asyncio.Timeout,
        headers: Callable[[], Mapping[str, str]],
        send_timeout_s: float,
        signs: Signs,
        write_directly: WriteDirectly | None,
    ) -> None:
        self._send = send
        self._write_directly = write_directly
        self._limit = limit
        self._headers = headers
        self._send_timeout_s = send_timeout_s
        self._signs = signs
        self._loop = asyncio.get_running_loop()
        self._kept: deque[Message] = deque()
        self._sending: asyncio.Task[None] | None = None
        """Sends what is kept; None: nothing is."""
        self._is_over = False
        self.sent_at = time.monotonic()
        self.has_begun = False

    def write(self, data: bytes) -> None:
        """Writes a piece: of an answer of events, whole events."""
        if not self.has_begun:
            self._begin(self._headers())
        self.sent_at = time.monotonic()
        write = self._write_directly
        if self._sending is not None or write is None or not write(data):
            self._pass({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Writes the last piece, and waits until the client's connection has all."""
        if not self.has_begun:
            self._begin(self._headers())
        self._is_over = True
        self._pass({"type": "http.response.body", "body": data, "more_body": False})
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        """Writes no more."""
        self._is_over = True
        if self._sending is not None:
            self._sending.cancel()

    def is_due(self, now: float) -> bool:
        """Returns whether a comment is wanted, and may be written."""
        signs = self._signs
        if not signs.interval_s or now - self.sent_at < signs.interval_s:
            return False
        may_begin = self.has_begun or signs.head is not None
        return may_begin and self._sending is None and not self._is_over

    async def beat(self) -> None:
        """Writes a comment."""
        if not self.has_begun and self._signs.head is not None:
            self._begin(self._signs.head)
        self.write(self._signs.comment)

    def _begin(self, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        self._pass(start_message(200, headers))

    def _pass(self, message: Message) -> None:
        """Hands a message to the connection; sending takes no step of the event loop unless the
        client reads slowly."""
        if self._sending is not None:
            self._kept.append(message)
            return
        steps = self._send(message).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        self._limit_wait()
        self._sending = self._loop.create_task(self._send_kept(steps, waits_for))

    async def _send_kept(self, steps: Generator[Any, Any, None], waits_for: Any) -> None:
        await rest_of(steps, waits_for)
        while self._kept:
            self._limit_wait()
            await self._send(self._kept.popleft())
        self._limit.reschedule(None)
        self._sending = None

    def _limit_wait(self) -> None:
        self._limit.reschedule(self._loop.time() + self._send_timeout_s)


@asynccontextmanager
async def open_writer(
    send: Send,
    headers: Callable[[], Mapping[str, str]],
    send_timeout_s: float,
    signs: Signs = Signs(),
    write_directly: WriteDirectly | None = None,
) -> AsyncIterator[EventWriter]:
    """Is open while the answer is made. Raises TimeoutError in the task that has opened it."""
    async with asyncio.timeout(None) as limit:
        writer = EventWriter(send, limit, headers, send_timeout_s, signs, write_directly)
        try:
            yield writer
        finally:
            writer.close()
