"""Lets connections read and parse in turns, and other work in between.

1. `may_begin`   what a read brought is parsed at once, as long as `_TURN_S` of this turn of the
                 event loop lasts and nothing waits
2. `wait`        a connection holds more than it was given to parse at once, or came too late
3. a turn        those that wait parse a piece each, round after round, until `_TURN_S` is over,
                 requests that begin first; then the event loop serves all others, and the
                 next ones follow
4. `drain`       what a connection still sends is thrown away: it may be read once more. Few are
                 in a turn, since a read costs as much as a piece does
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from edge.http.connection.gone_clients import GoneClients

_TURN_S = 0.005
_DRAINED_A_TURN = 4


class ParseTurns:
    """Is shared by the connections of one listener. `is_first`: a request begins; it comes before
    those of which a part was parsed, so that nothing waits for the long bodies of others."""

    def __init__(self) -> None:
        self._first: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._draining: deque[Callable[[], None]] = deque()
        self._is_set = False
        self._until = 0.0

    def may_begin(self, *, is_first: bool) -> bool:
        """Returns whether a connection that has just been read may parse without waiting."""
        if self._first or (self._others and not is_first):
            return False
        if not self._is_set:
            self._set()
            self._until = time.monotonic() + _TURN_S
            return True
        return time.monotonic() < self._until

    def wait(self, parse_on: Callable[[], None], *, is_first: bool) -> None:
        """Has `parse_on` called when it is its turn. It may ask for another one then."""
        (self._first if is_first else self._others).append(parse_on)
        self._set()

    def drain(self, read_on: Callable[[], None]) -> None:
        """Has `read_on` called when it is its turn."""
        self._draining.append(read_on)
        self._set()

    def _set(self) -> None:
        if not self._is_set:
            self._is_set = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_set = False
        self._until = time.monotonic() + _TURN_S
        # Some of each kind, so that none waits for ever.
        for queue in (self._first, self._others):
            while queue:
                queue.popleft()()
                if time.monotonic() > self._until:
                    break
        for _ in range(min(_DRAINED_A_TURN, len(self._draining))):
            self._draining.popleft()()
        if self._first or self._others or self._draining:
            self._set()


def _nothing() -> None:
    """Stands for what an ended connection would do."""


class HeldFlow(FlowControl):
    """Does not read from a client while something of what it sent is held, or the reader of the
    body has enough. `read_on` is called when it is held, and more is wanted of it. Meanwhile `gone`
    watches it."""

    def __init__(
        self, transport: asyncio.Transport, read_on: Callable[[], None], gone: GoneClients
    ) -> None:
        super().__init__(transport)
        self._client = transport
        self._read_on = read_on
        self._gone = gone
        self._is_held = False
        self.is_full = False

    def hold(self) -> None:
        self._is_held = True
        self._pause()

    def release(self) -> None:
        self._is_held = False
        if not self.is_full:
            self._resume()

    def drain_in_turn(self, turns: ParseTurns) -> None:
        """Reads on when it is this connection's turn to have what it sends thrown away."""
        self.hold()
        turns.drain(self.release)

    def end(self) -> None:
        """Drops the reference to the connection, which has ended."""
        self._gone.forget(self._client)
        self._read_on = _nothing

    def pause_reading(self) -> None:
        self.is_full = True
        self._pause()

    def resume_reading(self) -> None:
        self.is_full = False
        if self._is_held:
            self._read_on()
        else:
            self._resume()

    def _pause(self) -> None:
        if not self.read_paused:
            self._gone.watch(self._client)
        super().pause_reading()

    def _resume(self) -> None:
        if self.read_paused:
            self._gone.forget(self._client)
        super().resume_reading()
