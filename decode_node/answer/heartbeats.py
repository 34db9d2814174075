"""Puts signs of life on answers that have nothing new, so that a router can tell slow from frozen.

1. `watch`   an answer is being sent
2. `sending` marks when something of it goes out, and while the client is not taking it
3. `beat`    called often by the node while its engine is well: comments on all answers that were
             silent for `interval_s`. A node that hangs falls silent, and so does one with
             an engine of which a process gives no sign of life (`engine.node.status`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import Send

from decode_node.answer.journal import HEARTBEAT

_SEND_TIMEOUT_S = 0.05
"""A client that takes nothing for so many seconds has a full buffer, and needs no sign of life."""


class Pulse:
    """The pulse of one answer."""

    __slots__ = ("is_sending", "send", "sent_at")

    def __init__(self, send: Send) -> None:
        self.send = send
        self.sent_at = time.monotonic()
        self.is_sending = False

    @contextmanager
    def sending(self) -> Iterator[None]:
        self.is_sending = True
        try:
            yield
        finally:
            self.is_sending = False
            self.sent_at = time.monotonic()


class Heartbeats:
    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._pulses: set[Pulse] = set()

    @contextmanager
    def watch(self, send: Send) -> Iterator[Pulse]:
        pulse = Pulse(send)
        self._pulses.add(pulse)
        try:
            yield pulse
        finally:
            self._pulses.discard(pulse)

    async def beat(self) -> None:
        horizon = time.monotonic() - self._interval_s
        for pulse in tuple(self._pulses):
            if pulse in self._pulses and not pulse.is_sending and pulse.sent_at <= horizon:
                await self._beat(pulse)

    async def _beat(self, pulse: Pulse) -> None:
        message = {"type": "http.response.body", "body": HEARTBEAT, "more_body": True}
        # RuntimeError: the answer has ended while we waited to write.
        with suppress(TimeoutError, OSError, RuntimeError):
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await pulse.send(message)
        pulse.sent_at = time.monotonic()
