"""The slots of the host tier in one transfer process, and what each of them holds.

    header    magic, version, identity: of which model, layout and share of a rank the bytes are
    records   for each slot: name of its block, a checksum for each layer, a checksum of the record
    data      for each slot: a page for each of our layers

    1. `anonymous`, or `at` a file of a memory file system, which outlives this process and the node
    2. `clear` before a slot is written, `put` when its bytes are complete: a record whose own
       checksum is wrong says that the slot is empty. So a process may die at any moment
    3. `contents` after a restart
    4. `close`

The file is locked while it is open: of two processes that got the same one, the second gets
`TierUnavailable`. It is readable by its owner alone, as it holds what users wrote.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.devices.copy_stream import Numbers

NAME_BYTES = 48
"""A block's hash, and which group of layers and which numbers it is of."""
_MAGIC = b"tandem KV slots\x00"
_VERSION = 3
_HEADER = np.dtype(
    [("magic", "S16"), ("version", "<u4"), ("identity", "V32"), ("slots", "<u8"), ("bytes", "<u8")]
)
_ALIGNMENT = 1 << 21
"""Data begins at a large page."""
_LOCK_TIMEOUT_S = 10.0
"""A process that was killed with its node may need this long to be gone."""
_LOCK_PAUSE_S = 0.05


class TierUnavailable(KVTransferError):
    """Memory or files of a tier cannot be had. Says why."""


class SlotMemory:
    """`num_slots` slots of `num_layers` pages of `page_bytes`."""

    def __init__(self, memory: mmap.mmap, num_slots: int, num_layers: int, page_bytes: int) -> None:
        self._memory = memory
        self._fd = -1
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.page_bytes = page_bytes
        self.slot_bytes = num_layers * page_bytes
        whole = np.frombuffer(memory, np.uint8)
        kind = _record(num_layers)
        first = _aligned(_HEADER.itemsize, mmap.PAGESIZE)
        self._records = whole[first : first + num_slots * kind.itemsize].view(kind)
        data = _aligned(first + num_slots * kind.itemsize, _ALIGNMENT)
        self.data: npt.NDArray[np.uint8] = whole[data : data + num_slots * self.slot_bytes]
        """All slots, for pinning."""

    @classmethod
    def anonymous(cls, num_slots: int, num_layers: int, page_bytes: int) -> SlotMemory:
        """Takes memory that goes with this process. Pages are used when first touched."""
        size = _num_bytes(num_slots, num_layers, page_bytes)
        return cls(mmap.mmap(-1, size), num_slots, num_layers, page_bytes)

    @classmethod
    def at(
        cls, path: Path, identity: bytes, num_slots: int, num_layers: int, page_bytes: int
    ) -> SlotMemory:
        """Takes the file there, with all that it holds if it is of the same `identity` (32 bytes)
        and shape. Raises `TierUnavailable`."""
        size = _num_bytes(num_slots, num_layers, page_bytes)
        fd = -1
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock_file(fd, path)
            header = np.zeros((), _HEADER)
            header["magic"], header["version"] = _MAGIC, _VERSION
            header["identity"], header["slots"] = np.void(identity), num_slots
            header["bytes"] = size
            known = os.pread(fd, _HEADER.itemsize, 0) == header.tobytes()
            if not known or os.fstat(fd).st_size != size:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, size)
                os.pwrite(fd, header.tobytes(), 0)
            made = cls(mmap.mmap(fd, size), num_slots, num_layers, page_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise TierUnavailable(f"{size} bytes at {path} cannot be had: {error}") from error
        except TierUnavailable:
            os.close(fd)
            raise
        made._fd = fd
        return made

    def close(self) -> None:
        """Lets the file go. Memory stays mapped while arrays of it are left."""
        if self._fd >= 0:
            # The mapping has a descriptor of its own, which would keep the lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def addresses(self, slots: list[int], layer: int) -> Numbers:
        """Returns where the pages of a layer begin in these slots."""
        first = int(self.data.ctypes.data) + layer * self.page_bytes
        return first + self.slot_bytes * np.array(slots, np.int64)

    def slot(self, slot: int) -> npt.NDArray[np.uint8]:
        """Returns all pages of a slot."""
        return self.data[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def checksum(self, slot: int, layer: int) -> int:
        """Computes the checksum of a page."""
        start = slot * self.slot_bytes + layer * self.page_bytes
        return checksum(self.data[start : start + self.page_bytes])

    def checksums(self, slot: int) -> list[int]:
        """Computes the checksums of all pages of a slot."""
        return [self.checksum(slot, layer) for layer in range(self.num_layers)]

    def clear(self, slot: int) -> None:
        """Says that the slot holds nothing."""
        self._records[slot]["check"] = 0

    def clear_all(self) -> None:
        self._records["check"] = 0

    def put(self, slot: int, name: bytes, checksums: list[int]) -> None:
        """Says that the slot holds this block, whole. Raises `ValueError` for a name that is longer
        than `NAME_BYTES`: numpy would cut it, and nothing would find it again."""
        if len(name) > NAME_BYTES:
            raise ValueError(f"a block's name has at most {NAME_BYTES} bytes, not {len(name)}")
        record = self._records[slot]
        record["name"], record["layers"] = np.void(name.ljust(NAME_BYTES, b"\0")), checksums
        record["length"] = len(name)
        record["check"] = _check_of(record)

    def name_of(self, slot: int) -> bytes | None:
        """Returns the name of the block that the slot holds; None: nothing that can be trusted."""
        record = self._records[slot]
        if not record["check"] or record["check"] != _check_of(record):
            return None
        return bytes(record["name"])[: int(record["length"])]

    def known_checksum(self, slot: int, layer: int) -> int:
        """Returns that of a page which `put` was given."""
        return int(self._records[slot]["layers"][layer])

    def known_checksums(self, slot: int) -> list[int]:
        """Returns those that `put` was given."""
        return [int(code) for code in self._records[slot]["layers"]]

    def contents(self) -> dict[int, bytes]:
        """Returns the names of all blocks, by slot."""
        names = ((slot, self.name_of(slot)) for slot in range(self.num_slots))
        return {slot: name for slot, name in names if name is not None}


def lock_file(fd: int, path: Path) -> None:
    """Raises `TierUnavailable` when another process keeps the lock."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TierUnavailable(
                    f"{path} is in use by another node; give each node a directory of its own"
                ) from None
            time.sleep(_LOCK_PAUSE_S)


def checksum(memory: npt.NDArray[np.uint8]) -> int:
    """Returns the XXH3 of these bytes, of 64 bits: memory is read at twice the rate of a CRC-32C,
    which reads three places at once. A process that can forge it can write here anyway."""
    return xxhash.xxh3_64_intdigest(memory.data)


def _record(num_layers: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("check", "<u4"),
            ("length", "<u4"),
            ("name", f"V{NAME_BYTES}"),
            ("layers", "<u8", (num_layers,)),
        ]
    )


def _check_of(record: np.void) -> int:
    """Returns the checksum of all but itself; never 0, which says that the slot is empty."""
    return int(google_crc32c.value(record.tobytes()[4:])) or 1


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _num_bytes(num_slots: int, num_layers: int, page_bytes: int) -> int:
    first = _aligned(_HEADER.itemsize, mmap.PAGESIZE)
    records = num_slots * _record(num_layers).itemsize
    return _aligned(first + records, _ALIGNMENT) + max(1, num_slots * num_layers * page_bytes)
