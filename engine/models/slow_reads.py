"""Says in the log which file a process waits for, while it waits.

A network file system that does not answer holds a reader for hours, and no error comes. `with
telling_slow_reads(path):` around a read starts a thread, which logs a line after `AFTER_S` seconds
and then every `AFTER_S` more, until the read ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

AFTER_S = 10.0


@contextmanager
def telling_slow_reads(path: Path) -> Iterator[None]:
    """Logs that `path` is still being read, once it has taken long."""
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(path, ended), name="slow-read", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(path: Path, ended: threading.Event) -> None:
    seconds = 0.0
    while not ended.wait(AFTER_S):
        seconds += AFTER_S
        logger.warning(
            "%s has been read for %.0f s and has not come: does its file system answer?",
            path,
            seconds,
        )
