"""Bounds the memory of request bodies that arrive, all together, of all senders.

1. lease       one for each request, until its body was read and understood
2. free        the first `FREE_BYTES` of a body need no room, unless it says that it is longer
3. room        more is read while there is room for it
4. full        bodies are read no further: their senders wait. One goes on all the same, that of
               which most is here: it has `_PATIENCE_S` to end, so that nothing holds the room
5. given back  those of which least is here go on first
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

FREE_BYTES = 64 << 10
_PATIENCE_S = 5.0


class BodyRoom:
    """Is shared by the requests of one service, in one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._waiting: dict[BodyLease, asyncio.Future[None]] = {}
        self._favoured: BodyLease | None = None
        self.num_used = 0

    def lease(self, gone: asyncio.Future[None] | None = None) -> BodyLease:
        """Returns one. `gone` is done when the sender has left."""
        return BodyLease(self, gone)

    def is_full(self) -> bool:
        return self.num_used >= self._num_bytes

    async def wait(self, lease: BodyLease, clock: asyncio.Timeout) -> None:
        """Returns when more of a body may be read, or its sender has left. `clock` bounds what
        remains of reading it."""
        if not self.is_full() or lease is self._favoured:
            return
        lease.clock = clock
        self._waiting[lease] = asyncio.get_running_loop().create_future()
        self._favour()

        def wake(gone: asyncio.Future[None]) -> None:
            self._wake(lease)

        try:
            if lease.gone is not None:
                lease.gone.add_done_callback(wake)
            await self._waiting[lease]
        finally:
            del self._waiting[lease]
            if lease.gone is not None:
                lease.gone.remove_done_callback(wake)

    def give_back(self, lease: BodyLease) -> None:
        self.num_used -= lease.num_used
        if self._favoured is lease:
            self._favoured = None
        num_free = self._num_bytes - self.num_used
        for other in sorted(self._waiting, key=lambda other: other.num_bytes):
            if num_free <= 0:
                break
            num_free -= FREE_BYTES
            self._wake(other)
        self._favour()

    def _favour(self) -> None:
        if self._favoured is not None or not self._waiting or not self.is_full():
            return
        most = max(self._waiting, key=lambda lease: lease.num_bytes)
        self._favoured = most
        assert most.clock is not None
        until, when = asyncio.get_running_loop().time() + _PATIENCE_S, most.clock.when()
        most.clock.reschedule(until if when is None else min(when, until))
        self._wake(most)

    def _wake(self, lease: BodyLease) -> None:
        if not self._waiting[lease].done():
            self._waiting[lease].set_result(None)


@dataclass(eq=False, slots=True)
class BodyLease:
    """Holds room for one body until the end of `with`."""

    room: BodyRoom
    gone: asyncio.Future[None] | None = field(default=None, repr=False)
    num_bytes: int = 0
    clock: asyncio.Timeout | None = field(default=None, repr=False)
    num_free: int = FREE_BYTES

    @property
    def num_used(self) -> int:
        return max(0, self.num_bytes - self.num_free)

    def expect(self, num_bytes: int) -> None:
        """Notes the length that the body says it has, before any of it was read."""
        self.num_free = 0 if num_bytes > FREE_BYTES else FREE_BYTES

    async def wait(self, clock: asyncio.Timeout) -> None:
        """Returns when more of the body may be read, within `clock`."""
        if self.num_bytes >= self.num_free:
            await self.room.wait(self, clock)

    def take(self, num_bytes: int) -> None:
        """Counts what was read."""
        before = self.num_used
        self.num_bytes += num_bytes
        self.room.num_used += self.num_used - before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.room.give_back(self)
