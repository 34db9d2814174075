"""Says in the log which file a process waits for, while it waits.

A network file system that does not answer holds a reader for hours, and no error comes. `with
telling_slow_reads(path):` around a read starts a thread, which logs a line once the read has taken
`AFTER_S` seconds, and again every `AFTER_S`, until it ends. Inside another one it starts none: the
outer one's thread has the file of the inner one to tell of, so that many files need one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

AFTER_S = 10.0


class _Read:
    """Holds what a thread reads, and since when. It sets this; the one that logs looks."""

    def __init__(self, path: Path) -> None:
        self.now = path, time.monotonic()


_own = threading.local()


@contextmanager
def telling_slow_reads(path: Path) -> Iterator[None]:
    """Logs that `path` is still being read, once it has taken long."""
    read: _Read | None = getattr(_own, "read", None)
    if read is None:
        with _telling(path):
            yield
        return
    around = read.now[0]
    read.now = path, time.monotonic()
    try:
        yield
    finally:
        read.now = around, time.monotonic()


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    _own.read = _Read(path)
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(_own.read, ended), name="slow-read", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _own.read = None


def _tell(read: _Read, ended: threading.Event) -> None:
    wait_s = AFTER_S
    while not ended.wait(wait_s):
        path, began = read.now
        seconds = time.monotonic() - began
        wait_s = AFTER_S if seconds >= AFTER_S else AFTER_S - seconds
        if seconds >= AFTER_S:
            logger.warning(
                "%s has been read for %.0f s and has not come: does its file system answer?",
                path,
                seconds,
            )
