"""Times at which a process did nothing else, in memory that another process of this host may read.

    the reader                                 the process
    1. `PauseLog.create`
    2. a handle travels in its configuration ──▶ 3. `PauseLog.attach`
    5. `pauses`                              ◀── 4. `add`; `watch_garbage` adds collections

Only what is worth a line is added: the caller decides how long a pause has to be. The newest
`NUM_PAUSES` are kept.
"""

from __future__ import annotations

import gc
import struct
import time
from enum import IntEnum
from typing import NamedTuple

import msgspec

from host.memory_file import MemoryFile

NUM_PAUSES = 1024
LEAST_GARBAGE_S = 0.0005
_RECORD = struct.Struct("<ddii")
"""Holds ended at, seconds, kind + 1, detail."""


class PauseKind(IntEnum):
    """Says what a process was at. The detail of a collection is its generation."""

    GARBAGE = 0
    EVENT_LOOP = 1
    TURN = 2


class Pause(NamedTuple):
    """One pause. `ended_at`: CLOCK_MONOTONIC seconds."""

    ended_at: float
    seconds: float
    kind: PauseKind
    detail: int


class PauseLogHandle(msgspec.Struct, frozen=True):
    """Lets another process of this host map the memory."""

    pid: int
    fd: int


class PauseLog:
    """The newest pauses of one process. One writer; anything may read."""

    def __init__(self, memory: MemoryFile) -> None:
        self._memory = memory
        self._num_added = 0
        self._collecting_since = 0.0

    @classmethod
    def create(cls, name: str) -> PauseLog:
        return cls(MemoryFile.create(name, NUM_PAUSES * _RECORD.size))

    @classmethod
    def attach(cls, handle: PauseLogHandle) -> PauseLog:
        """Raises FileNotFoundError or PermissionError when its maker is gone or not ours."""
        return cls(MemoryFile.attach(handle.pid, handle.fd))

    @property
    def handle(self) -> PauseLogHandle:
        return PauseLogHandle(self._memory.pid, self._memory.fd)

    def add(self, kind: PauseKind, ended_at: float, seconds: float, detail: int = 0) -> None:
        """Adds a pause of this process."""
        offset = self._num_added % NUM_PAUSES * _RECORD.size
        self._num_added += 1
        _RECORD.pack_into(self._memory.buffer, offset, ended_at, seconds, kind + 1, detail)

    def watch_garbage(self) -> None:
        """Adds every collection of garbage from now on that takes `LEAST_GARBAGE_S`. It costs two
        calls a collection."""
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting_since = now
        elif now - self._collecting_since >= LEAST_GARBAGE_S:
            seconds = now - self._collecting_since
            self.add(PauseKind.GARBAGE, now, seconds, info["generation"])

    def pauses(self, since: float = 0.0) -> list[Pause]:
        """Returns the pauses that ended after `since`, the oldest first."""
        return sorted(
            Pause(ended_at, seconds, PauseKind(kind - 1), detail)
            for ended_at, seconds, kind, detail in _RECORD.iter_unpack(self._memory.buffer)
            if kind and ended_at > since
        )

    def close(self) -> None:
        """Ends the watch, too."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self._memory.close()
