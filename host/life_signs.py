"""Signs of life of the processes of one engine, on one page of memory that they share.

    who watches                                    each process
    1. `LifeSigns.create`: one place for each
    2. a handle travels in its configuration ────▶ 3. `LifeSign.attach`
    5. `LifeWatch.longest`: who is silent,   ◀──── 4. `give`, every `SIGN_INTERVAL_S`
       and for how long

A sign is the time at which it was given, so nothing is asked and nothing is sent: it costs one
store of four bytes. Where it comes from decides what it says. A process that does little gives it
in its loop: it is alive and not stuck. One that computes for long has a thread for it
(`LifeThread`), so that a long step is not taken for a frozen process; that steps come to an end is
watched by the process that waits for them. For a process on another host, which cannot share
memory, the process that receives from it gives the sign.

A place without a sign is not watched: its process is starting, or there is none.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from host.memory_file import MemoryFile

SIGN_INTERVAL_S = 0.25
_STOOD_STILL_S = 1.0
_NO_SIGN = 0
_WORD_BYTES = ctypes.sizeof(ctypes.c_uint32)


class LifeSignHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Lets another process of this host give the signs of one place."""

    pid: int
    fd: int
    place: int


class LifeSign:
    """The signs of this process."""

    def __init__(self, memory: MemoryFile, place: int) -> None:
        self._memory = memory
        self._word = ctypes.c_uint32.from_buffer(memory.buffer, place * _WORD_BYTES)

    @classmethod
    def attach(cls, handle: LifeSignHandle) -> LifeSign:
        """Raises FileNotFoundError or PermissionError when the watcher is gone or not ours."""
        return cls(MemoryFile.attach(handle.pid, handle.fd), handle.place)

    def give(self) -> None:
        """Says that this process is alive now."""
        self._word.value = _now_ms() or 1


class LifeSigns:
    """The signs of all processes. Of each: CLOCK_MONOTONIC in milliseconds, modulo 2^32."""

    def __init__(self, memory: MemoryFile, first: int, count: int) -> None:
        self._memory = memory
        self._first = first
        offset = first * _WORD_BYTES
        self._words = (ctypes.c_uint32 * count).from_buffer(memory.buffer, offset)

    @classmethod
    def create(cls, name: str, count: int) -> LifeSigns:
        """Returns `count` places; nothing has given a sign yet."""
        return cls(MemoryFile.create(name, count * _WORD_BYTES), 0, count)

    @classmethod
    def attach(cls, handle: LifeSignHandle) -> LifeSigns:
        """Returns all places from that of `handle` on. Raises like `LifeSign.attach`."""
        memory = MemoryFile.attach(handle.pid, handle.fd)
        return cls(memory, handle.place, memory.size // _WORD_BYTES - handle.place)

    def part(self, first: int) -> LifeSigns:
        """Returns the places from `first` on, counted from 0."""
        return LifeSigns(self._memory, self._first + first, len(self._words) - first)

    def handle(self, place: int) -> LifeSignHandle:
        """Returns what the process at `place` gives its signs with."""
        memory = self._memory
        return LifeSignHandle(pid=memory.pid, fd=memory.fd, place=self._first + place)

    def give(self, place: int) -> None:
        """The process at `place` gave a sign just now."""
        self._words[place] = _now_ms() or 1

    def forget(self, place: int) -> None:
        """Forgets the process at `place`, which has ended: it is not watched until it gives a sign
        again."""
        self._words[place] = _NO_SIGN

    def silent_s(self, place: int) -> float | None:
        """Seconds since the last sign; None when there was none."""
        word = self._words[place]
        return None if word == _NO_SIGN else ((_now_ms() - word) & 0xFFFFFFFF) / 1000


def _now_ms() -> int:
    return int(time.monotonic() * 1000) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Silence:
    """`name` has given no sign of life for `seconds`."""

    name: str = ""
    seconds: float = 0.0


class LifeWatch:
    """Judges silence. Ask often: time in which the asker itself stood still, because all processes
    of the host did, counts for none."""

    def __init__(self, signs: LifeSigns, names: Mapping[int, str]) -> None:
        """`names` by place."""
        self._signs = signs
        self._names = names
        self._asked_at = self._patient_since = time.monotonic()

    def longest(self) -> Silence:
        """Returns the longest silence among those that have ever given a sign."""
        return max(self.silences().values(), key=lambda silence: silence.seconds, default=Silence())

    def silences(self) -> dict[int, Silence]:
        """Returns silences by place, of those that have ever given a sign."""
        now = time.monotonic()
        if now - self._asked_at > _STOOD_STILL_S:
            self._patient_since = now
        self._asked_at = now
        found = {}
        for place, name in self._names.items():
            silent_s = self._signs.silent_s(place)
            if silent_s is not None:
                found[place] = Silence(name, min(silent_s, now - self._patient_since))
        return found


class LifeThread:
    """Gives the signs of a process whose other threads may compute for long; never holds it up."""

    def __init__(self, give: Callable[[], None]) -> None:
        self._give = give
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._give()
            if self._over.wait(SIGN_INTERVAL_S):
                return

    def close(self) -> None:
        """Closes them. Idempotent."""
        self._over.set()
        self._thread.join()
