"""A ring of fixed slots in shared memory: one writer, R readers, every reader sees every message.

    bytes 0..63            published: low 32 bits of the newest sequence number (futex of readers)
    one 64-byte line       acknowledged: low 32 bits of the last sequence number that this reader
    for each reader        has copied out (futex of the writer)
    num_slots slots        32-byte header: sequence, size, crc32, place; then the payload

Message number s (from 1) lives in slot s % num_slots.

    writer                                         reader r
    1. waits until every reader has                4. sees published, finds sequence s in its slot
       acknowledged s - num_slots                  5. copies the payload, checks size and crc
    2. writes payload, size, crc, then sequence    6. writes acknowledged[r] = s, wakes the writer
    3. writes published = s, wakes the readers

Each word has one writer, so nothing needs a lock or an atomic addition. The sequence number is
written last; the checksum makes that hold on machines, too, that let other processes see stores
in another order than they were made in (the reader then looks again).
"""

from __future__ import annotations

import zlib
from enum import IntEnum

import msgspec

from host.futex import FutexWord
from host.memory_file import MemoryFile

_LINE_BYTES = 64
_SLOT_HEADER_BYTES = 32
_SEQUENCE, _SIZE, _CRC, _PLACE = range(4)
"""Index of an int64 in a slot's header."""


class RingError(Exception):
    """The ring holds something that no correct writer puts there. The reader must end."""


class Place(IntEnum):
    """Says whether a message's payload is in its slot or arrives over a socket."""

    SLOT = 0
    SOCKET = 1


class RingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Lets another process of this host map the ring."""

    pid: int
    fd: int
    num_readers: int
    num_slots: int
    slot_bytes: int


class ShmRingBuffer:
    """The memory of the ring and the steps that never wait. See `message_queue` for the rest."""

    def __init__(self, memory: MemoryFile, handle: RingHandle) -> None:
        self._memory = memory
        self.handle = handle
        self.published = FutexWord(memory.buffer, 0)
        self.acknowledged = [
            FutexWord(memory.buffer, (1 + reader) * _LINE_BYTES)
            for reader in range(handle.num_readers)
        ]
        self._payloads: list[memoryview] = []
        self._headers: list[memoryview] = []
        """Both by slot."""
        self._map_slots()

    @classmethod
    def create(cls, name: str, num_readers: int, num_slots: int, slot_bytes: int) -> ShmRingBuffer:
        """Creates the writer's ring. `slot_bytes`: largest payload of a slot, a multiple of 8."""
        if num_readers < 1 or num_slots < 1 or slot_bytes < 8 or slot_bytes % 8:
            raise ValueError("a ring needs a reader, a slot, and slots of a multiple of 8 bytes")
        size = (1 + num_readers) * _LINE_BYTES + num_slots * (_SLOT_HEADER_BYTES + slot_bytes)
        memory = MemoryFile.create(name, size)
        handle = RingHandle(
            pid=memory.pid,
            fd=memory.fd,
            num_readers=num_readers,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
        )
        return cls(memory, handle)

    @classmethod
    def attach(cls, handle: RingHandle) -> ShmRingBuffer:
        """Attaches a reader to the ring. Raises FileNotFoundError when its writer is gone."""
        return cls(MemoryFile.attach(handle.pid, handle.fd), handle)

    def _map_slots(self) -> None:
        whole = memoryview(self._memory.buffer)
        start = (1 + self.handle.num_readers) * _LINE_BYTES
        for _ in range(self.handle.num_slots):
            payload_start = start + _SLOT_HEADER_BYTES
            self._headers.append(whole[start:payload_start].cast("q"))
            start = payload_start + self.handle.slot_bytes
            self._payloads.append(whole[payload_start:start])

    def slowest_reader(self, sequence: int) -> int | None:
        """Returns a reader that still needs the slot which `sequence` would overwrite; None if it
        is free.
        """
        for reader in range(self.handle.num_readers):
            if self.num_unread(reader, sequence) > self.handle.num_slots:
                return reader
        return None

    def num_unread(self, reader: int, sequence: int) -> int:
        """Messages up to `sequence` that `reader` has not acknowledged."""
        return (sequence - self.acknowledged[reader].value) & 0xFFFFFFFF

    def publish(self, sequence: int, payload: bytes, place: Place) -> None:
        """Does steps 2 and 3. The slot must be free and `payload` fit."""
        slot = sequence % self.handle.num_slots
        header = self._headers[slot]
        self._payloads[slot][: len(payload)] = payload
        header[_SIZE] = len(payload)
        header[_CRC] = zlib.crc32(payload)
        header[_PLACE] = place
        header[_SEQUENCE] = sequence
        self.published.value = sequence
        self.published.wake()

    def read(self, sequence: int) -> tuple[bytes, Place] | None:
        """Does step 5; returns None while `sequence` is not complete. Raises RingError when the
        slot holds a message that cannot be there before `sequence` was read.
        """
        slot = sequence % self.handle.num_slots
        header = self._headers[slot]
        found = header[_SEQUENCE]
        if found != sequence:
            if found not in (0, sequence - self.handle.num_slots):
                raise RingError(
                    f"expected message {sequence}, found {found}: messages were lost, "
                    f"so this reader's state is not the writer's any more"
                )
            return None
        size = header[_SIZE]
        if not 0 <= size <= self.handle.slot_bytes:
            return None
        payload = bytes(self._payloads[slot][:size])
        if zlib.crc32(payload) != header[_CRC]:
            return None
        return payload, Place(header[_PLACE])

    def acknowledge(self, reader: int, sequence: int) -> None:
        """Does step 6."""
        word = self.acknowledged[reader]
        word.value = sequence
        word.wake()

    def close(self) -> None:
        """Unmaps. No other method may be called afterwards. Idempotent."""
        if not self._headers:
            return
        for view in (*self._headers, *self._payloads):
            view.release()
        self._headers.clear()
        self._payloads.clear()
        self.acknowledged.clear()
        del self.published
        self._memory.close()
