"""Whether what a puller was given is still as it was: blocks of a cache, or a slot of a
window.

The holder may release the blocks at any time, and a puller that reads memory itself would not
notice. So the holder's transfer process has words in which it takes back its own before it tells
any other:

    words[slot] = number of the lease; 0: none's

1. producer `ReadLeases()`; process and descriptor go with the handshake, or the address
2. `take()`       before a puller gets it; slot and number go with it
3. `release()`     when the transfer ends, or the slot of the window is read: before that memory can
                  serve another
4. puller `is_held(...)`, or a read of the word, when its copies are done: if it is held, all that
   they read was right. A process that has died releases nothing, but with it have gone its
   descriptors and words
"""

from __future__ import annotations

import os
import secrets
import struct
from dataclasses import dataclass
from itertools import count
from weakref import finalize

from host.memory_file import MemoryFile
from kv_transfer.errors import KVTransferError

LeaseName = tuple[int, int]
"""Slot and number, as they go with the names of blocks."""

NUM_LEASES = 16_384
"""More than a process can have transfers, or slots of a window."""
_WORD = struct.Struct("<I")
WORD_BYTES = _WORD.size
_RANGE = 1 << 32


@dataclass(frozen=True, slots=True)
class ReadLeasesFile:
    """Tells a puller where the read leases of a transfer process are."""

    pid: int
    fd: int

    def is_held(self, slot: int, number: int) -> bool:
        """Raises OSError when the process has gone."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            word = os.pread(fd, _WORD.size, slot * _WORD.size)
        finally:
            os.close(fd)
        return word == _WORD.pack(number)


@dataclass(frozen=True, slots=True)
class ReadLease:
    """One read lease; `number` tells it from all others that have had the slot."""

    leases: ReadLeases
    slot: int
    number: int

    def release(self) -> None:
        """Releases it. Idempotent."""
        self.leases.end(self)


class ReadLeases:
    """The read leases of one transfer process."""

    def __init__(self) -> None:
        self._memory = MemoryFile.create("tandem-read-leases", NUM_LEASES * _WORD.size)
        finalize(self, self._memory.close)
        self._free = list(reversed(range(NUM_LEASES)))
        # From anywhere, so that the leases of another process are no leases of ours.
        self._numbers = count(secrets.randbelow(_RANGE))

    @property
    def file(self) -> ReadLeasesFile:
        return ReadLeasesFile(self._memory.pid, self._memory.fd)

    @property
    def address(self) -> int:
        """Returns where the words begin."""
        return self._memory.address

    @property
    def num_bytes(self) -> int:
        return self._memory.size

    @property
    def num_held(self) -> int:
        return NUM_LEASES - len(self._free)

    def take(self) -> ReadLease:
        """Raises KVTransferError when there are too many."""
        if not self._free:
            raise KVTransferError(f"pullers hold {NUM_LEASES} read leases already")
        lease = ReadLease(self, self._free.pop(), next(self._numbers) % (_RANGE - 1) + 1)
        self._write(lease.slot, lease.number)
        return lease

    def end(self, lease: ReadLease) -> None:
        if self._read(lease.slot) == lease.number:
            self._write(lease.slot, 0)
            self._free.append(lease.slot)

    def _read(self, slot: int) -> int:
        word: int = _WORD.unpack_from(self._memory.buffer, slot * _WORD.size)[0]
        return word

    def _write(self, slot: int, word: int) -> None:
        _WORD.pack_into(self._memory.buffer, slot * _WORD.size, word)
