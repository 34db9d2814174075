"""Bounds the time for which a client reads nothing of what was written to it.

1. `start`   something may lie here that the client has not taken. Starting it again changes
             nothing
2. late      it has taken nothing for the whole time: the connection is cut. If it has taken some,
             or this process was held up and could not send, the time begins anew
3. `stop`    all is on its way, or the connection has gone
"""

from __future__ import annotations

import asyncio

HELD_UP_S = 0.25
"""A timer that fires this much later than it should tells that this process was held up."""
_WRITER_FIRST_S = 1.0
"""The writer of an answer gives up by a clock of its own this much sooner, and can say why."""


class SendClock:
    """Is one connection's. It stands until it is started."""

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s + _WRITER_FIRST_S
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0

    def start(self) -> None:
        if self._timer is not None:
            return
        self._num_unread = self._transport.get_write_buffer_size()
        if self._num_unread:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._on_timeout)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        assert self._timer is not None
        was_held_up = asyncio.get_running_loop().time() - self._timer.when() > HELD_UP_S
        self._timer = None
        if was_held_up or self._transport.get_write_buffer_size() < self._num_unread:
            self.start()
        else:
            self._transport.abort()
