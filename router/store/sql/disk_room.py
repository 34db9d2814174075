"""Keeps the last room of SQLite's disk for what makes room.

SQLite writes each change to a log before it changes the file: on a disk that is full nothing can be
deleted either, and what has expired would stay, and with it the disk full.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sqlalchemy.engine import Connection

_KEPT = 16 << 20
"""Bytes; the log takes 4 MiB, and more while a transaction deletes more."""
_MOST_SHARE = 4
"""At most one byte in this many of a small disk is kept."""


def check_room(connection: Connection, file: Path) -> None:
    """Raises `OSError` where a transaction that adds something would take that room, or the file
    was removed: what it adds would be gone with this process. What was deleted leaves free pages
    in the file, which grows no more then."""
    disk = os.statvfs(file)
    free, kept = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize // _MOST_SHARE
    if free >= min(_KEPT, kept):
        return
    size, count = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
        for name in ("page_size", "freelist_count")
    )
    if free + size * count < min(_KEPT, kept):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: its last is for deleting")
