"""Keeps answers of events from silence: whatever has nothing new gets a comment now and then.

A client gets them so that nothing on the way takes the connection for dead: proxies cut one on
which nothing came for a minute or less. A router gets them of a decode node so that it can tell
slow from frozen.

1. watch     an answer is awaited, or being sent
2. sending   marks when something of it goes out, and while the client is not taking it
3. beat      called often by a service while it is well: comments on all answers that were silent
             for their interval. A node that hangs falls silent, and so does one with an engine of
             which a process gives no sign of life (`engine.node.status`)

An answer that has not begun may begin with a comment. From then on its status is 200, and what goes
wrong is an event: until then it is an HTTP error (`Head`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from starlette.types import Message, Send

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {
    "content-type": EVENT_STREAM,
    "cache-control": "no-store",
    # nginx, and what took it over from nginx, would collect events until its buffers are full.
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"

EVENT_END = b"\n\n"

_EVENT_ENDS = (EVENT_END, b"\r\n\r\n")
_PIECE, _PIECE_S = 16, 0.001
_SEND_TIMEOUT_S = 0.05
"""A client that takes nothing for this many seconds has a full buffer, and needs no sign of
life."""


class Head:
    """Sends the head of an answer once: the answer, or a comment that comes before it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = asyncio.Lock()
        self._is_sent = False

    async def send(self, status: int, headers: Mapping[str, str]) -> None:
        """Does nothing when it was sent. A call that is cancelled has sent nothing."""
        async with self._sending:
            if not self._is_sent:
                await send_start(self._send, status, headers)
                self._is_sent = True

    async def take(self) -> bool:
        """Returns whether nothing was sent: the head is the caller's then, and no other's."""
        async with self._sending:
            was_sent, self._is_sent = self._is_sent, True
            return not was_sent


class Pulse:
    """Has the pulse of one answer: `comment` after every `interval_s` of silence. `begin` sends the
    head if need be; without it the answer has begun."""

    __slots__ = (
        "_begin",
        "_comment",
        "_interval_s",
        "_is_sending",
        "_is_within",
        "_send",
        "sent_at",
    )

    def __init__(
        self,
        send: Send,
        comment: bytes = KEEP_ALIVE,
        interval_s: float = 1.0,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._send = send
        self._comment = comment
        self._interval_s = interval_s
        self._begin = begin
        self._is_sending = False
        self._is_within = False
        self.sent_at = time.monotonic()

    @contextmanager
    def sending(self, data: bytes = EVENT_END) -> Iterator[None]:
        """Is open while `data` is sent, or the head. Events may come in pieces: nothing is put
        between them."""
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False
            self.sent(data, time.monotonic())

    def sent(self, data: bytes, now: float) -> None:
        """Records that `data` has gone out, at monotonic seconds."""
        self._is_within = not data.endswith(_EVENT_ENDS)
        self.sent_at = now

    def is_due(self, now: float) -> bool:
        """Returns whether a comment is wanted, and may be sent."""
        is_silent = now - self.sent_at >= self._interval_s
        return is_silent and not self._is_sending and not self._is_within

    async def beat(self) -> None:
        # RuntimeError: the answer has ended while we waited to write.
        with suppress(TimeoutError, OSError, RuntimeError):
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                if self._begin is not None:
                    await self._begin()
                await self._send(
                    {"type": "http.response.body", "body": self._comment, "more_body": True}
                )
        self.sent_at = time.monotonic()


class Beating(Protocol):
    """An answer that is watched. `sent_at`: when something of it went out last."""

    sent_at: float

    def is_due(self, now: float) -> bool: ...
    async def beat(self) -> None: ...


BeatingT = TypeVar("BeatingT", bound=Beating)


class Heartbeats:
    """Holds the pulses of all answers that are open."""

    def __init__(self) -> None:
        self._pulses: set[Beating] = set()

    @contextmanager
    def watch(self, pulse: BeatingT) -> Iterator[BeatingT]:
        self._pulses.add(pulse)
        try:
            yield pulse
        finally:
            self._pulses.discard(pulse)

    async def beat(self) -> None:
        """Sends what is due. Of very many answers all others use the event loop in between: a
        comment goes out at once, so that sending it lets none do so."""
        now = began = time.monotonic()
        for number, pulse in enumerate(tuple(self._pulses), start=1):
            if number % _PIECE == 0 and time.monotonic() - began > _PIECE_S:
                await asyncio.sleep(0)
                now = began = time.monotonic()
            if pulse in self._pulses and pulse.is_due(now):
                try:
                    await pulse.beat()
                except Exception:
                    # Without signs of life a router takes all other answers for hung.
                    logger.exception("a comment on an answer cannot be sent")

    async def run(self, pause_s: float) -> None:
        """Beats until cancelled, for a service that is well as long as it runs."""
        while True:
            await self.beat()
            await asyncio.sleep(pause_s)


def start_message(status: int, headers: Mapping[str, str]) -> Message:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    await send(start_message(status, headers))
