"""Makes an input smaller that ends its process, or fails: each try is a fork of its own.

Hypothesis shrinks what it has drawn itself. What kills a process, and what a search by coverage has
found, is bytes alone: pieces of these are left out, ever smaller ones, while the end stays what it
was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_MOST_S = 60.0
_RAISED = 77


def shrunk(data: bytes, check: Callable[[bytes], None], most_s: float = _MOST_S) -> bytes:
    """Returns the smallest input found, within `most_s`, that ends as `data` does."""
    wanted, until = _end(data, check), time.monotonic() + most_s
    if not wanted:
        return data
    size = max(1, len(data) // 2)
    while size and time.monotonic() < until:
        at, has_shrunk = 0, False
        while at < len(data) and time.monotonic() < until:
            shorter = data[:at] + data[at + size :]
            if _end(shorter, check) == wanted:
                data, has_shrunk = shorter, True
            else:
                at += size
        if not has_shrunk or size > len(data):
            size //= 2
    return data


def _end(data: bytes, check: Callable[[bytes], None]) -> int:
    """Returns how a fork ends that checks the input: 0 where nothing is wrong."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            check(data)
        except BaseException:
            status = _RAISED
        os._exit(status)
    return os.waitpid(child, 0)[1]
