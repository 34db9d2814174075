"""Sleeping on a word of shared memory until another process changes it.

    sleeper                                     waker
    1. seen = word.value                        a. changes what the word announces
    2. looks for what it waits for: not there   b. word.value = new
    3. word.wait(seen) ───────────────────────▶ c. word.wake()

No wake-up is lost: the kernel compares the word with `seen` before it puts the sleeper to sleep,
so a change between 1 and 3 makes `wait` return at once. A sleeper uses no CPU.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexWord:
    """An aligned 32-bit word at `offset` of a shared mapping, with exactly one writer.

    Loads and stores are single machine instructions, so no half-written value is ever seen.
    """

    def __init__(self, buffer: mmap.mmap, offset: int) -> None:
        """Raises OSError on a machine whose futex system call is unknown."""
        number = _SYS_FUTEX.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"no futex on a {platform.machine()} machine")
        self._number = ctypes.c_long(number)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._word = ctypes.c_uint32.from_buffer(buffer, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    @property
    def value(self) -> int:
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value & 0xFFFFFFFF

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleeps while the word is `seen`, at most `timeout_s`. May return early; look again."""
        whole = int(timeout_s)
        limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
        result = self._syscall(
            self._number,
            self._address,
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(seen),
            ctypes.byref(limit),
            None,
            ctypes.c_int(0),
        )
        if result < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, os.strerror(code))

    def wake(self) -> None:
        """Wakes all sleepers."""
        self._syscall(
            self._number,
            self._address,
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(_EVERYBODY),
            None,
            None,
            ctypes.c_int(0),
        )
