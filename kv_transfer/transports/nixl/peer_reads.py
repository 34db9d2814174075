"""Reads of peers' memory that are under way, and what they are worth.

    1. `PeerReads.copy`, `copy_rows`   places are gathered
    2. `PeerReads.post(lease)`         all of them are read at once
    3. then the word of the lease is read: behind the data, so that it outlasted them if it stands
    4. `ReadBatch.word`, or `ReadBatch.error`

`ReadQueue` asks for them while there are any; `settled` waits for all.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from ctypes import addressof, c_char
from dataclasses import dataclass

import numpy as np

from kv_transfer.errors import TransferTimeout
from kv_transfer.memory.copy_stream import Copier, Numbers
from kv_transfer.transports.named.read_leases import WORD_BYTES, LeaseName
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, Transfer

_NUM_WORDS = 1024
"""Batches that can be under way at once."""
_LOOKS_IN_A_ROW = 30
_PAUSE_S = 0.0005
_HELD_UP_S = 0.1
"""Looks follow each other at once. What one is later than that, this process stood still."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of the peer that NIXL knows by `name`: words of its leases begin at `leases`; our
    cache is on the first of `devices`, the peer's on the second."""

    name: str
    leases: int
    devices: tuple[int | None, int | None]


@dataclass(eq=False, slots=True)
class ReadBatch:
    """Reads what one message named. `word` is that of its lease in this slot, once all was read;
    None before, and if it failed for the reason in `error`."""

    memory: PeerMemory
    slot: int
    data: Transfer | None = None
    lease: Transfer | None = None
    place: int | None = None
    word: int | None = None
    error: str = ""
    waited_s: float = 0.0
    """Seconds for which it was looked at, without those in which we were held up ourselves."""

    @property
    def has_ended(self) -> bool:
        return self.word is not None or bool(self.error)


class ReadQueue:
    """All reads of one agent. Lives on one event loop."""

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent
        self._words = mmap.mmap(-1, _NUM_WORDS * WORD_BYTES)
        self._array = np.frombuffer(self._words, np.uint32)
        self._address = addressof(c_char.from_buffer(self._words))
        agent.register(self._address, len(self._words), None)
        self._free = list(range(_NUM_WORDS))
        self._under_way: list[ReadBatch] = []
        self._poller: asyncio.Task[None] | None = None
        self._ended_at = self._looked_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, batch: ReadBatch, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        memory = batch.memory
        try:
            if len(targets):
                batch.data = self.agent.read(memory.name, targets, sources, sizes, memory.devices)
        except NixlError as error:
            batch.error = str(error)
            return
        if not self._under_way:
            self._ended_at = self._looked_at = time.monotonic()
        self._under_way.append(batch)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    async def settled(self, patience_s: float) -> None:
        """Waits for the reads into our cache that are under way. Raises `TransferTimeout` when none
        ends for so long, not counting time in which we were held up ourselves: then nobody can say
        when our cache is written to no more."""
        awaited = [batch for batch in self._under_way if batch.data is not None]
        looked_at = time.monotonic()
        while any(not batch.has_ended for batch in awaited):
            now = time.monotonic()
            self._ended_at += max(0.0, now - looked_at - _HELD_UP_S)
            looked_at = now
            if not self._look() and time.monotonic() - self._ended_at > patience_s:
                raise TransferTimeout(
                    f"{len(awaited)} reads through NIXL did not end for {patience_s:g} s"
                )
            await asyncio.sleep(0)

    def abandon(self, batch: ReadBatch, why: str) -> None:
        """Asks no more for a batch without data. Its place for a word is not used again."""
        batch.error = why
        self._under_way.remove(batch)

    def reads_from(self, memory: PeerMemory) -> bool:
        return any(batch.memory is memory for batch in self._under_way)

    def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()

    async def _poll(self) -> None:
        looks = 0
        while self._under_way:
            looks = 0 if self._look() else looks + 1
            await asyncio.sleep(0 if looks < _LOOKS_IN_A_ROW else _PAUSE_S)

    def _look(self) -> bool:
        """Returns whether any batch has ended."""
        now = time.monotonic()
        waited_s, self._looked_at = min(now - self._looked_at, _HELD_UP_S), now
        for batch in self._under_way:
            batch.waited_s += waited_s
            try:
                self._advance(batch)
            except NixlError as error:
                batch.error = str(error)
        left = [batch for batch in self._under_way if not batch.has_ended]
        if len(left) == len(self._under_way):
            return False
        self._free += [
            batch.place for batch in self._under_way if batch.has_ended and batch.place is not None
        ]
        self._under_way = left
        self._ended_at = time.monotonic()
        return True

    def _advance(self, batch: ReadBatch) -> None:
        if batch.data is not None and not batch.data.is_done():
            return
        if batch.lease is None:
            if not self._free:
                return
            batch.place = self._free.pop()
            batch.lease = self._read_word(batch, batch.place)
        if batch.lease.is_done():
            batch.word = int(self._array[batch.place])

    def _read_word(self, batch: ReadBatch, place: int) -> Transfer:
        memory = batch.memory
        target, source = (
            np.array([start + number * WORD_BYTES])
            for start, number in ((self._address, place), (memory.leases, batch.slot))
        )
        size = np.array([WORD_BYTES])
        return self.agent.read(memory.name, target, source, size, (None, None))


class PeerReads(Copier):
    """Reads memory of one peer."""

    def __init__(self, queue: ReadQueue, memory: PeerMemory) -> None:
        self.memory = memory
        self._queue = queue
        self._gathered: list[tuple[Numbers, Numbers, Numbers]] = []

    def copy(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool = False
    ) -> None:
        self._gathered.append((targets, sources, sizes))

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_bytes: int,
        num_rows: int,
    ) -> None:
        row = np.arange(num_rows)
        sizes = np.full(num_rows, row_bytes)
        self._gathered.append((target + row * target_pitch, source + row * source_pitch, sizes))

    def post(self, lease: LeaseName) -> ReadBatch:
        """Begins to read what was gathered."""
        gathered, self._gathered = self._gathered, []
        batch = ReadBatch(self.memory, lease[0])
        nothing = np.empty(0, np.int64)
        parts = zip(*gathered, strict=True) if gathered else ([nothing],) * 3
        targets, sources, sizes = (np.concatenate(list(part)) for part in parts)
        self._queue.begin(batch, targets, sources, sizes)
        return batch
