"""Has the C library give large blocks of memory back as soon as they are free.

glibc keeps what was freed of the sizes that were freed before, up to 32 MiB, and lays blocks that
grow beside each other into one heap, with holes between them. Where bodies of megabytes come and go
that is twice what they have. A block of its own for each costs its pages being touched again.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 128 << 10


def return_large_blocks() -> None:
    """Is called once in a process, at its start. Other C libraries do as they do."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
