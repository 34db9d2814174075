"""Reads of peers' windows into a window of ours, and what they are worth.

    1. `begin`        a slot of ours is taken; without one the read waits for its turn, as it does
                      while some of the same peer are under way: many at once would all end late
    2. the data are read
    3. then the word of the lease is read: behind the data, so that it outlasted them if it stands.
       With it the peer gets notice that its slot was read, if nothing more is to come of it
    4. `on_end`       `word` is there, or `error`
    5. `give_back`    what was read is not needed any more; the slot serves the next

A read without data begins with 3: it finds out whether the peer can be reached. `ReadQueue` looks
at reads while there are any. One that never ends keeps its slot for ever, and nothing else.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, c_char
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.transports.in_place.read_leases import WORD_BYTES, LeaseName
from kv_transfer.transports.nixl.agent import NixlError, Transfer
from kv_transfer.transports.nixl.window import FairSlots, Window

_NUM_WORDS = 1024
"""Reads that can be under way at once."""
_READS_AT_ONCE = 2
"""This many slots of one peer are read at once: the word of one while the data of the other are."""
_LOOKS_IN_A_ROW = 30
_PAUSE_S = 0.0005
_LOOKS_AT_ALL = 2000
"""Polling is rare after this many polls (about 1 s)."""
_LONG_PAUSE_S = 0.05
_HELD_UP_S = 0.1
"""Looks follow each other at once. What one is later than that, this process stood still."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of the peer that NIXL knows by `name`: its window on `device`, and words of its leases
    from `leases` on. `turns`: this many of its slots are read at once."""

    name: str
    address: int
    num_slots: int
    slot_bytes: int
    device: int | None
    leases: int
    turns: FairSlots = field(default_factory=lambda: FairSlots(_READS_AT_ONCE), compare=False)


def _nothing(read: WindowRead) -> None:
    return


@dataclass(eq=False, slots=True)
class WindowRead:
    """One read of `num_bytes` at `source` in the peer's window, under a lease of the peer.

    `word` is that of the lease, once all was read; None before, and if it failed for the reason in
    `error`. `notice` is what the peer gets then.
    """

    memory: PeerMemory
    lease: LeaseName
    source: int = 0
    num_bytes: int = 0
    notice: bytes = b""
    on_end: Callable[[WindowRead], None] = _nothing
    turn: int | None = None
    slot: int | None = None
    word: int | None = None
    error: str = ""
    waited_s: float = 0.0
    """Seconds for which it was looked at, without those in which we were held up ourselves."""
    data: Transfer | None = None
    word_read: Transfer | None = None
    place: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.word is not None or bool(self.error)


class ReadQueue:
    """All reads into one window. Lives on one event loop. `on_error` is called for what went wrong
    with something that was read: nothing is looked at any more then."""

    def __init__(self, window: Window, on_error: Callable[[BaseException], None]) -> None:
        """Makes memory for words known to NIXL. Raises NixlError."""
        self.window = window
        self._on_error = on_error
        self._words = mmap.mmap(-1, _NUM_WORDS * WORD_BYTES)
        self._array = np.frombuffer(self._words, np.uint32)
        self._address = addressof(c_char.from_buffer(self._words))
        window.agent.register(self._address, len(self._words), None)
        self._free_places = list(range(_NUM_WORDS))
        self._under_way: list[WindowRead] = []
        self._has_begun = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._looked_at = time.monotonic()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def is_empty(self) -> bool:
        """Returns whether nothing is read, nor any slot taken or waited for."""
        slots = self.window.slots
        is_unused = slots.num_free == slots.num_slots and not slots.num_waiting
        return is_unused and not self._under_way

    def begin(self, read: WindowRead) -> None:
        if read.num_bytes and not self._has_room(read):
            return
        try:
            self._post(read)
        except NixlError as error:
            read.error = str(error)
            self._end(read)
            return
        if not self._under_way:
            self._looked_at = time.monotonic()
        self._under_way.append(read)
        self._has_begun.set()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    def withdraw(self, read: WindowRead) -> bool:
        """Returns whether the read had not begun; it never will."""
        if read.slot is not None:
            return False
        self.window.slots.leave(read)
        read.memory.turns.leave(read)
        self._end_turn(read)
        return True

    def give_back(self, read: WindowRead) -> None:
        """Gives back its slot: what was read into it is not needed any more."""
        if read.slot is not None:
            self.window.slots.give_back(read.slot)

    def abandon(self, read: WindowRead, why: str) -> None:
        """Asks no more for a read without data. Its place for a word is not used again."""
        read.error = why
        self._under_way.remove(read)

    def is_stuck(self, patience_s: float) -> bool:
        """Returns whether reads that have not ended for that long hold all slots."""
        hang = [read for read in self._under_way if read.slot is not None]
        late = sum(read.waited_s > patience_s for read in hang)
        return late == self.window.slots.num_slots

    def reads_from(self, memory: PeerMemory) -> bool:
        return any(read.memory is memory for read in self._under_way)

    def close(self) -> None:
        """The window goes as well, unless something may still be written to it."""
        if self._poller is not None:
            self._poller.cancel()
        if not self._under_way:
            self.window.close()

    def _has_room(self, read: WindowRead) -> bool:
        """Returns whether it is its turn, and it has a slot. If not, it is begun again then."""
        if read.turn is None:
            read.turn = read.memory.turns.take(read, lambda: self.begin(read))
        if read.turn is not None:
            read.slot = self.window.slots.take(read, lambda: self.begin(read))
        return read.slot is not None

    def _end(self, read: WindowRead) -> None:
        self._end_turn(read)
        read.on_end(read)

    def _end_turn(self, read: WindowRead) -> None:
        if read.turn is not None:
            read.memory.turns.give_back(read.turn)
            read.turn = None

    def _post(self, read: WindowRead) -> None:
        memory, window = read.memory, self.window
        if read.slot is not None:
            target, size = window.address_of(read.slot), read.num_bytes
            devices = window.device, memory.device
            read.data = window.agent.read(memory.name, *_one(target, read.source, size), devices)

    async def _poll(self) -> None:
        looks = 0
        try:
            while self._under_way:
                looks = 0 if self._look() or self._has_begun.is_set() else looks + 1
                self._has_begun.clear()
                if looks < _LOOKS_IN_A_ROW:
                    await asyncio.sleep(0)
                else:
                    await self._pause(_PAUSE_S if looks < _LOOKS_AT_ALL else _LONG_PAUSE_S)
        except Exception as error:
            self._on_error(error)

    async def _pause(self, seconds: float) -> None:
        """Waits for `seconds`, or until a read has begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_begun.wait()

    def _look(self) -> bool:
        """Returns whether anything was read."""
        now = time.monotonic()
        waited_s, self._looked_at = min(now - self._looked_at, _HELD_UP_S), now
        has_advanced = False
        for read in self._under_way:
            read.waited_s += waited_s
            try:
                has_advanced |= self._advance(read)
            except NixlError as error:
                read.error = str(error)
        ended = [read for read in self._under_way if read.has_ended]
        if ended:
            self._under_way = [read for read in self._under_way if not read.has_ended]
            self._free_places += [read.place for read in ended if read.place is not None]
            for read in ended:
                self._end(read)
        return has_advanced or bool(ended)

    def _advance(self, read: WindowRead) -> bool:
        """Returns whether it is further than before."""
        if read.word_read is None:
            if (read.data is not None and not read.data.is_done()) or not self._free_places:
                return False
            read.place = self._free_places.pop()
            read.word_read = self._read_word(read, read.place)
        elif not read.word_read.is_done():
            return False
        if read.word_read.is_done():
            read.word = int(self._array[read.place])
        return True

    def _read_word(self, read: WindowRead, place: int) -> Transfer:
        target = self._address + place * WORD_BYTES
        source = read.memory.leases + read.lease[0] * WORD_BYTES
        parts = _one(target, source, WORD_BYTES)
        return self.window.agent.read(read.memory.name, *parts, (None, None), read.notice)


def _one(target: int, source: int, size: int) -> tuple[Numbers, Numbers, Numbers]:
    return np.array([target]), np.array([source]), np.array([size])
