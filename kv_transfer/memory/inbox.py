"""Host memory from which arrived KV is copied into the cache.

    1. `reserve(num_bytes)`  pinned memory into which a socket writes a message; None: use your own
    2. `lend(payload)`       an address that stays good until the copies issued next are done: where
                             the payload lies, if that is pinned, or a copy of it
    3. `copies_issued()`     after them: the copy goes when they are done
    4. `give_back(slot)`     what was reserved goes when all copies issued before are done

Where copies happen at once nothing is pinned, and a payload is copied from where it lies. For a
device half of the memory are slots for 1, the other half is a ring for 2, because copies are done
in the order in which they were issued. When the ring is full, the oldest copies are waited for:
they depend on nothing else, so it is a moment.

    |....|oldest ... newest|....|        |newest|......|oldest ...... |
         ^ tail            ^ head               ^ head ^ tail
"""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

from kv_transfer.errors import StagingFull
from kv_transfer.memory.devices.copy_queue import CopyQueue
from kv_transfer.memory.devices.device import MemoryDevice
from kv_transfer.memory.staging import ByteArray, StagedChunk, StagingPool


class Inbox:
    """`capacity` bytes, pinned at once where the device wants them; messages of `message_bytes`
    and less have slots."""

    def __init__(
        self, device: MemoryDevice, copies: CopyQueue, capacity: int, message_bytes: int
    ) -> None:
        self._copies = copies
        self._copies_at_once = device.copies_at_once
        self._capacity = 0 if device.copies_at_once else capacity // 2
        self._slots = StagingPool(self._capacity, message_bytes)
        self._is_copy_lent = False
        device.pin(self._slots.memory)
        self._memory: ByteArray = np.empty(0, np.uint8)
        if self._capacity:
            self._memory = np.frombuffer(mmap.mmap(-1, self._capacity), np.uint8)
            device.pin(self._memory)
        self._lent: deque[tuple[int, int]] = deque()
        """[start, stop) of each, the oldest first."""

    @property
    def used(self) -> int:
        return self._slots.used + sum(stop - start for start, stop in self._lent)

    def reserve(self, num_bytes: int) -> StagedChunk | None:
        """Returns memory that is to be given back."""
        if num_bytes > self._slots.slot_bytes or not self._slots.num_slots:
            return None
        return self._slots.take(num_bytes, is_awaited=True)

    def give_back(self, slot: StagedChunk) -> None:
        self._copies.then_sometime(lambda: self._slots.drop(slot))

    def lend(self, payload: ByteArray) -> int:
        """Raises `StagingFull` for a payload that can never fit."""
        address = int(payload.ctypes.data)
        self._is_copy_lent = not (self._copies_at_once or self._slots.holds(address))
        if not self._is_copy_lent:
            return address
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
        if self._is_copy_lent:
            self._copies.then_sometime(self._return_oldest)

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
