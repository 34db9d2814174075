"""The disk tier in one transfer process: a file for our share of each block.

    DIRECTORY/<identity>/rank<r>-<i>of<n>/lock
                                         /ab/abcd...ef.kv      named by the block's hash

    header    `block_header`
    pages     one for each of our layers

A file is written under another name and renamed when it is complete; it is never changed. What a
crash leaves is therefore whole, or has a name that nothing reads, or fails its checksums: then it
is removed, and counted. Files of other models lie in other directories, which are left alone.

Everything here blocks; call it from one thread, but for `stop_scan`.
"""

from __future__ import annotations

import os
from pathlib import Path

from kv_transfer.memory.pool.block_header import BlockHeaders
from kv_transfer.memory.pool.slot_memory import (
    SlotMemory,
    TierUnavailable,
    lock_file,
)

_ENDING = ".kv"
_UNFINISHED = ".part"


class BlockFiles:
    """Files below `folder`, for blocks of the shape of `memory`'s slots."""

    def __init__(self, folder: Path, identity: bytes, memory: SlotMemory) -> None:
        """Takes the folder for itself. Raises `TierUnavailable`."""
        self._folder = folder
        self._memory = memory
        self._headers = BlockHeaders(identity, memory.num_layers)
        self.num_damaged = 0
        """Files that were not what they should be, since the start."""
        self._is_scan_wanted = True
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierUnavailable(f"{folder} cannot be used: {error}") from error
        try:
            lock_file(self._lock, folder)
        except TierUnavailable:
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def scan(self) -> list[bytes]:
        """Returns the names of all blocks, those used longest ago first, by reading headers. Files
        that a crash left unfinished and damaged ones are removed. Raises OSError for folders that
        cannot be listed."""
        found: list[tuple[float, bytes]] = []
        for path in self._folder.glob("??/*"):
            if not self._is_scan_wanted:
                break
            try:
                name = self._name_in(path)
                if name is None:
                    self.num_damaged += path.suffix != _UNFINISHED
                    path.unlink()
                else:
                    found.append((path.stat().st_mtime, name))
            except OSError:
                self.num_damaged += 1
        return [name for _, name in sorted(found)]

    def stop_scan(self) -> None:
        """Ends a scan early, from any thread: nothing wants to be notified of it any more."""
        self._is_scan_wanted = False

    def write(self, slot: int) -> bool:
        """Writes the block that a slot holds; False: it was forgotten meanwhile. Raises OSError, as
        for a full disk; nothing is left of it then."""
        name = self._memory.name_of(slot)
        if name is None:
            return False
        header = self._headers.make(name, self._memory.known_checksums(slot))
        path = self._path(name)
        unfinished = path.with_suffix(_UNFINISHED)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with open(unfinished, "wb", buffering=0, opener=_private) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), self._memory.slot(slot).data)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return True

    def read(self, name: bytes, slot: int) -> bool:
        """Reads a block into a slot, whose record then says so. Returns False when the file is
        missing or not what it should be; it is removed then."""
        path, memory = self._path(name), self._memory
        memory.clear(slot)
        try:
            with path.open("rb", buffering=0) as file:
                found = self._headers.read(file.read(self._headers.num_bytes))
                if found is not None and found[0] == name:
                    _read_all(file.fileno(), memory.slot(slot).data)
                    if memory.checksums(slot) == found[1]:
                        memory.put(slot, name, found[1])
                        os.utime(path)
                        return True
        except OSError:
            pass
        self.num_damaged += 1
        self.remove(name)
        return False

    def remove(self, name: bytes) -> None:
        """Removes a block, if it is here."""
        self._unlink(self._path(name))

    def remove_all(self) -> None:
        """Removes all that can be removed; what cannot be is counted."""
        for folder in self._folder.glob("??"):
            try:
                paths = list(folder.iterdir())
            except OSError:
                self.num_damaged += 1
                continue
            for path in paths:
                self._unlink(path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            self.num_damaged += 1

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}{_ENDING}"

    def _name_in(self, path: Path) -> bytes | None:
        if path.suffix != _ENDING:
            return None
        size = self._headers.num_bytes + self._memory.slot_bytes
        with path.open("rb", buffering=0) as file:
            found = self._headers.read(file.read(self._headers.num_bytes))
            if found is None or os.fstat(file.fileno()).st_size != size:
                return None
        return found[0] if self._path(found[0]) == path else None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, view: memoryview) -> None:
    """Raises OSError when the file is too short."""
    while view:
        count = os.readv(fd, [view])
        if count == 0:
            raise OSError("the file ends early")
        view = view[count:]
