"""A timer of the kernel's that is waited for as a connection is, to the microsecond: a wait for
sockets ends at whole milliseconds, and so do the timers of uvloop.

1. made     rests
2. `set`    its descriptor can be read from then on, and again after each interval
3. `read`   tells how often; it cannot be read before the next time
4. `close`
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


class _Times(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


_library = ctypes.CDLL(None, use_errno=True)


class KernelTimer:
    """Times are CLOCK_MONOTONIC seconds, as `time.monotonic` gives them. Methods raise OSError."""

    def __init__(self) -> None:
        self._descriptor: int = _library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer can be made")

    def fileno(self) -> int:
        return self._descriptor

    def set(self, at_s: float, interval_s: float = 0.0) -> None:
        """Sets it in place of what was set before. What is past is due at once; `interval_s` 0: it
        is due once."""
        times = _Times(_Timespec.of(interval_s), _Timespec.of(at_s))
        if _library.timerfd_settime(self._descriptor, _ABSOLUTE, ctypes.byref(times), None):
            raise OSError(ctypes.get_errno(), "a timer cannot be set")

    def stop(self) -> None:
        """Lets it rest, also where it was due."""
        self.set(0.0)

    def read(self) -> int:
        """Returns how often it was due since it was set or read; 0: not yet."""
        try:
            return int.from_bytes(os.read(self._descriptor, 8), sys.byteorder)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self._descriptor)
