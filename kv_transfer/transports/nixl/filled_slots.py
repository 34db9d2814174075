"""The slots of a producer's window that hold KV for pullers.

    1. `fill`       copies of chunks into a slot are issued
    2. `was_filled` they are done: a read lease says that the slot holds them, and the puller may
                    get the message
    3. `was_read`   the puller has read them; or `release`: nothing reads them any more. The lease
                    ends, then the slot is free
    -  `was_late`   they are not read for long, and others wait for slots: a host that has died says
                    nothing, and its calls may stay open for a quarter of an hour

A slot that is released before 2 is free once its copies are done. Nothing learns of what they
copied.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kv_transfer.memory.cache_view import KVCacheView, copy_joined
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.memory.page_copy import page_copy
from kv_transfer.planes import PageShape
from kv_transfer.transports.in_place.read_leases import LeaseName, ReadLease, ReadLeases
from kv_transfer.transports.nixl.packed_chunks import packed_blocks
from kv_transfer.transports.nixl.window import Window
from kv_transfer.wire.chunk_grid import ChunkGrid

_HELD_UP_S = 0.1
"""Ticks follow each other at once. What one is later than that, this process stood still."""


class SlotUser(ABC):
    """Fills slots for one puller, and learns what becomes of them."""

    @abstractmethod
    def was_filled(self, filled: FilledSlot) -> None:
        """It may be read."""

    @abstractmethod
    def was_read(self, filled: FilledSlot) -> None:
        """It is given up now."""

    @abstractmethod
    def was_late(self) -> None:
        """The puller has to do without its slots."""


class FilledSlot:
    """Chunks in one slot. `lease` is there once they are copied, `since` says when that was."""

    __slots__ = ("indices", "is_released", "lease", "since", "slot", "user")

    def __init__(self, slot: int, indices: list[int], user: SlotUser) -> None:
        self.slot = slot
        self.indices = indices
        self.user = user
        self.lease: ReadLease | None = None
        self.since = 0.0
        self.is_released = False


class FilledSlots:
    """Copies KV of `cache` into slots of `window`, and knows which are still to be read."""

    def __init__(self, window: Window, leases: ReadLeases, cache: KVCacheView) -> None:
        self.window = window
        self.leases = leases
        self.is_filled = asyncio.Event()
        """Is set when a slot may be read."""
        self._cache = cache
        self._unread: dict[LeaseName, FilledSlot] = {}
        """Slots that may be read, the longest first."""
        self._clock_s = 0.0
        """Stands still while this process does: what peers said meanwhile is not read yet."""
        self._ticked_at = time.monotonic()

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def fill(
        self,
        filled: FilledSlot,
        grid: ChunkGrid,
        share: tuple[PageShape, ...],
        block_ids: Sequence[Numbers],
    ) -> None:
        """Copies what `share` names of its chunks, which lie in these blocks, by group."""
        cache, start = self._cache, self.window.address_of(filled.slot)
        for blocks in packed_blocks(grid, share, np.array(filled.indices)):
            page, wanted = cache.pages[blocks.group], share[blocks.group]
            places = block_ids[blocks.group][blocks.numbers]
            sources = cache.pages_of(blocks.group, blocks.layers, places)
            copies = page_copy(wanted, page, wanted).of_blocks(start + blocks.offsets, sources)
            copy_joined(cache.copies.stream, *copies, in_portions=False)
        cache.copies.then(lambda: self._copied(filled))

    def was_read(self, lease: LeaseName | None) -> bool:
        """Returns whether any slot had this lease; it is free now."""
        filled = self._unread.get(lease) if lease is not None else None
        if filled is None:
            return False
        filled.user.was_read(filled)
        self.release(filled)
        return True

    def release(self, filled: FilledSlot) -> None:
        """Nothing reads it any more. Idempotent."""
        if filled.is_released:
            return
        filled.is_released = True
        lease = filled.lease
        if lease is not None:
            lease.release()
            del self._unread[lease.slot, lease.number]
            self.window.slots.give_back(filled.slot)

    def tick(self, patience_s: float) -> None:
        """Reclaims slots unread for `patience_s` while others wait for slots."""
        now = time.monotonic()
        self._clock_s += min(now - self._ticked_at, _HELD_UP_S)
        self._ticked_at = now
        longest = next(iter(self._unread.values()), None)
        if longest is None or self._clock_s - longest.since < patience_s:
            return
        if self.window.slots.is_awaited_beside(longest.user):
            longest.user.was_late()

    def _copied(self, filled: FilledSlot) -> None:
        if filled.is_released:
            self.window.slots.give_back(filled.slot)
            return
        lease = filled.lease = self.leases.take()
        self._unread[lease.slot, lease.number] = filled
        filled.since = self._clock_s
        self.is_filled.set()
        filled.user.was_filled(filled)
