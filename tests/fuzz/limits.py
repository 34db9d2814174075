"""Bounds what one input may cost the process that tries it.

1. `begin`    notes the input in a file, which outlives the process, and starts the clock
2. `end`      raises `Fault` where the input took too long, or made the process grow too much
-  an input that never ends: the kernel ends the process (SIGPROF) after `HANG_S` of its time
-  one that takes all memory: `bound_memory` has said how much there is
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

from tests.fuzz.target import Fault, Target

HANG_S = 20.0
"""Processor time after which an input counts as one that never ends."""
_MEMORY = 3 << 30
"""Bytes of address space beyond those of a process that has tried nothing."""
_RESET_PEAK = b"5"


class Limits:
    """Watches one process. `current`: the file of the input that is being tried."""

    def __init__(self, target: Target, current: Path) -> None:
        self._target = target
        self._file = os.open(current, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._started = self._resident = 0.0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def begin(self, data: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
        os.pwrite(self._reset, _RESET_PEAK, 0)
        self._resident = _peak_bytes()
        signal.setitimer(signal.ITIMER_PROF, HANG_S)
        self._started = time.process_time()

    def end(self) -> None:
        took = time.process_time() - self._started
        signal.setitimer(signal.ITIMER_PROF, 0)
        if took > self._target.max_s:
            raise Fault(f"took {took:.2f} s of processor time, not {self._target.max_s:g}")
        grown = _peak_bytes() - self._resident
        if grown > self._target.max_bytes:
            raise Fault(f"grew by {grown >> 20} MiB, not {self._target.max_bytes >> 20}")


def bound_memory() -> None:
    """Lets nothing take much more than this process has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _peak_bytes() -> int:
    """Returns the most memory that was resident since the last reset."""
    with Path("/proc/self/status").open(encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
