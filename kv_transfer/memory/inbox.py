"""Host memory from which arrived KV is copied into the cache.

1. `lend(payload)`   an address that stays good until the copies issued next are done
2. `copies_issued()` after them: the memory comes back when they are done

Where copies happen at once this is the payload itself. For a device it is a ring of pinned memory,
because copies are done in the order in which they were issued. When it is full, the oldest copies
are waited for: they depend on nobody else, so it is a moment.

    |....|oldest ... newest|....|        |newest|......|oldest ...... |
         ^ tail            ^ head               ^ head ^ tail
"""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

from kv_transfer.errors import StagingFull
from kv_transfer.memory.copy_queue import CopyQueue
from kv_transfer.memory.device import MemoryDevice
from kv_transfer.staging import ByteArray


class Inbox:
    """`capacity` bytes, pinned at once where the device wants them."""

    def __init__(self, device: MemoryDevice, copies: CopyQueue, capacity: int) -> None:
        self._copies = copies
        self._copies_at_once = device.copies_at_once
        self._capacity = 0 if device.copies_at_once else capacity
        self._memory: ByteArray = np.empty(0, np.uint8)
        if self._capacity:
            self._memory = np.frombuffer(mmap.mmap(-1, self._capacity), np.uint8)
            device.pin(self._memory)
        self._lent: deque[tuple[int, int]] = deque()
        """[start, stop) of each, the oldest first."""

    @property
    def used(self) -> int:
        return sum(stop - start for start, stop in self._lent)

    def lend(self, payload: ByteArray) -> int:
        """Raises `StagingFull` for a payload that can never fit."""
        if self._copies_at_once:
            return int(payload.ctypes.data)
        if payload.nbytes > self._capacity:
            raise StagingFull(
                f"{payload.nbytes} bytes of KV arrived at once, but there are {self._capacity} "
                f"bytes of staging memory; raise staging_bytes"
            )
        while (start := self._find_room(payload.nbytes)) is None:
            if not self._copies.wait_for_oldest():
                raise StagingFull("memory for arriving KV was lent, but never used")
        self._lent.append((start, start + payload.nbytes))
        target = self._memory[start : start + payload.nbytes]
        np.copyto(target, payload)
        return int(target.ctypes.data)

    def copies_issued(self) -> None:
        if not self._copies_at_once:
            self._copies.then(self._return_oldest)

    def _return_oldest(self) -> None:
        self._lent.popleft()

    def _find_room(self, num_bytes: int) -> int | None:
        if not self._lent:
            return 0
        tail, head = self._lent[0][0], self._lent[-1][1]
        if tail < head:
            if head + num_bytes <= self._capacity:
                return head
            return 0 if num_bytes <= tail else None
        return head if head + num_bytes <= tail else None
