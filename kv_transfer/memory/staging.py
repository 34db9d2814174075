"""Host memory for KV that is on its way out: slots of one arena, made once, bounded.

A staged chunk is the finished wire message: header and payload lie in one slot, so sending it
(twice, if it must be repeated) copies nothing in Python, and a GPU writes into it directly. Life
of a chunk:

    1. `take`        a slot, before the copy begins; none when the pool is full
    2. `publish`     the copy is done and the message complete: nothing may displace it, something
                     still needs it
    3. `mark_sent`   all pullers have it: kept for a repeat, but displaced when space is needed
    4. `drop`        its transfer has ended; or displaced by `take`

Between `pin` and `unpin` a copy or a socket still uses the slot: whatever became of the chunk
meanwhile, the slot is given to nothing else.

Chunks that nothing pulls yet must leave `reserve` slots free, so transfers whose puller is waiting
always get through, whatever lies staged for pullers that never come.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import StagingFull

ByteArray = npt.NDArray[np.uint8]


class StagedChunk:
    """One slot in use. `message` is None before it was published, and after it was displaced or
    dropped; `buffer` is where the message is written."""

    __slots__ = ("buffer", "is_dropped", "is_published", "num_pins", "slot")

    def __init__(self, slot: int, buffer: ByteArray) -> None:
        self.slot = slot
        self.buffer = buffer
        self.is_published = False
        self.is_dropped = False
        self.num_pins = 0

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    @property
    def message(self) -> ByteArray | None:
        return self.buffer if self.is_published and not self.is_dropped else None


class StagingPool:
    """`capacity` bytes as slots of `slot_bytes`, the longest message there is."""

    def __init__(self, capacity: int, slot_bytes: int, reserve: int = 0) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = capacity // slot_bytes
        self.capacity = self.num_slots * slot_bytes
        if not 0 <= reserve <= self.num_slots:
            raise ValueError("the reserve must be smaller than the pool")
        # Pages are taken when first touched, and given back with the process.
        self._arena = mmap.mmap(-1, max(1, self.capacity))
        self.memory: ByteArray = np.frombuffer(self._arena, np.uint8, count=self.capacity)
        """All slots, to be registered with a device."""
        self._address = int(self.memory.ctypes.data)
        self._reserve = reserve
        self._free = list(reversed(range(self.num_slots)))
        self._sent: dict[int, StagedChunk] = {}
        """Chunks that may be displaced, by slot, the longest sent first."""
        self.used = 0
        """Bytes of all messages that hold a slot."""
        self.num_displaced = 0

    def take(self, num_bytes: int, is_awaited: bool) -> StagedChunk | None:
        """Returns a slot for a message of `num_bytes`; None: none is free now.

        `is_awaited`: a puller waits for it, so it may use the reserve.

        Raises:
            StagingFull: It could never fit.
        """
        if num_bytes > self.slot_bytes or self.num_slots == 0:
            raise StagingFull(
                f"a chunk of {num_bytes} bytes does not fit into {self.capacity} bytes of staging "
                f"memory; raise staging_bytes or lower chunk_bytes"
            )
        keep = 0 if is_awaited else self._reserve
        while len(self._free) <= keep:
            if not self._displace():
                return None
        slot = self._free.pop()
        self.used += num_bytes
        start = slot * self.slot_bytes
        return StagedChunk(slot, self.memory[start : start + num_bytes])

    def holds(self, address: int) -> bool:
        """Returns whether it lies in one of the slots."""
        return 0 <= address - self._address < self.capacity

    def publish(self, chunk: StagedChunk) -> None:
        """The message is complete. Of a chunk that was dropped meanwhile nothing remains."""
        chunk.is_published = True

    def mark_sent(self, chunk: StagedChunk) -> None:
        if chunk.message is not None:
            self._sent[chunk.slot] = chunk

    def drop(self, chunk: StagedChunk) -> None:
        """Drops the message. Idempotent."""
        if chunk.is_dropped:
            return
        if self._sent.get(chunk.slot) is chunk:
            del self._sent[chunk.slot]
        chunk.is_dropped = True
        self._free_if_unused(chunk)

    def pin(self, chunk: StagedChunk) -> None:
        chunk.num_pins += 1

    def unpin(self, chunk: StagedChunk) -> None:
        chunk.num_pins -= 1
        self._free_if_unused(chunk)

    def _free_if_unused(self, chunk: StagedChunk) -> None:
        if chunk.is_dropped and chunk.num_pins == 0:
            self.used -= chunk.num_bytes
            self._free.append(chunk.slot)

    def _displace(self) -> bool:
        """Displaces the longest sent that nothing uses just now. False: there is none."""
        for chunk in self._sent.values():
            if chunk.num_pins == 0:
                self.drop(chunk)
                self.num_displaced += 1
                return True
        return False
