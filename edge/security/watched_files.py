"""Watches files that are renewed while we run, such as certificates and secrets.

They are looked at when they are used: that costs a system call each, and misses nothing. What is
renewed file by file does not fit together for a moment; until it does, what was read before goes
on to be used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from edge.file_version import FileVersion, file_version
from edge.security.config import SecurityError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Signature = tuple[FileVersion, ...]
_ATTEMPTS = 3


class WatchedFiles(Generic[T]):
    """Keeps what `read` makes of `paths`, made again when one of them has changed. May be used by
    many threads. Raises `SecurityError` if it cannot be made at first."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._lock = threading.Lock()
        self._complaint = ""
        self._signature, self._value = self._read_whole()
        self.version = 0
        """Grows whenever something new was read."""

    def get(self) -> T:
        with self._lock:
            self._refresh()
            return self._value

    def _refresh(self) -> None:
        try:
            if self._sign() == self._signature:
                return
            self._signature, self._value = self._read_whole()
        except (SecurityError, OSError) as error:
            self._complain(error)
        else:
            self.version += 1
            self._complaint = ""
            logger.info("read again: %s", ", ".join(map(str, self._paths)))

    def _complain(self, error: Exception) -> None:
        """Logs a failure, once for each reason."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("the former one is used still: %s", error)

    def _read_whole(self) -> tuple[_Signature, T]:
        """Reads the files, again if they were replaced meanwhile."""
        for _ in range(_ATTEMPTS):
            try:
                before = self._sign()
                value = self._read()
                if self._sign() == before:
                    return before, value
            except OSError as error:
                raise SecurityError(f"a file of credentials cannot be read: {error}") from None
        raise SecurityError(f"{self._paths[0]} and its companions change all the time")

    def _sign(self) -> _Signature:
        return tuple(file_version(path) for path in self._paths)
