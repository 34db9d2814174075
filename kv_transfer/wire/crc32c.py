"""CRC-32C of large pieces of memory, computed while other threads of the process go on.

google_crc32c computes with Python's lock held: two threads check no more than one. The library that
its extension is linked with is called without the lock instead, where the extension lets it be
found (its wheels for Linux do); elsewhere all of it is computed under the lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import google_crc32c
import numpy as np

Memory = bytes | bytearray | memoryview

_LARGE_BYTES = 16 << 10
"""Fewer are checked before another thread could take the lock: the call itself takes 2 us."""

_Extend = Callable[[int, int, int], int]


def value(memory: Memory) -> int:
    """Returns the CRC-32C of `memory`, which is contiguous."""
    return extend(0, memory)


def extend(crc: int, memory: Memory) -> int:
    """Returns the CRC-32C of what has the checksum `crc`, and `memory` behind it."""
    # The extension takes an array, but no memoryview that can be written to.
    array = np.frombuffer(memory, np.uint8)
    if _unlocked is None or array.nbytes < _LARGE_BYTES:
        extended: int = google_crc32c.extend(crc, array)
        return extended
    return _unlocked(crc, array.ctypes.data, array.nbytes)


def find_unlocked() -> _Extend | None:
    """Returns a function of (crc, address, bytes) that leaves the lock to others; None: the
    extension does not show it."""
    if find_spec("google_crc32c._crc32c") is None:
        return None
    path = import_module("google_crc32c._crc32c").__file__
    # Symbols of the libraries that the extension needs are found through it.
    function = getattr(ctypes.CDLL(path), "crc32c_extend", None)
    if function is None:
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    found: _Extend = function
    return found


_unlocked = find_unlocked()
