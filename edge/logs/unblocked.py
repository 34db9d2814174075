"""Writes the log to standard error, and never waits long for what reads it there.

A collector that stands still, or whose disk is full, leaves the pipe full. A write waits then, and
with it all of the process: its answers, and its answers to probes. So a line that finds no room is
dropped, and when there is some again the log says how many were: in a file, too, whose disk is
full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Callable
from functools import partial

_PIPE_BYTES = 256 << 10
"""Holds some thousand lines, as come while a reader is late; 64 KiB are usual."""
_WAIT_S = 0.2
_WAITS_EVERY_S = 10.0
"""Waiting for a reader that is only late takes a fiftieth of the time at most."""
_FULL_DISK = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS
"""Errors of a disk that may be taken care of while the process runs."""


class UnblockedHandler(logging.Handler):
    """`write` takes bytes to where `fd` leads, and returns how many it took. It raises `OSError`,
    and `BlockingIOError` where there is no room. `end` closes what it writes to."""

    def __init__(self, fd: int, write: Callable[[bytes], int], end: Callable[[], None]) -> None:
        super().__init__()
        self._fd = fd
        self._write = write
        self._end = end
        self._rest = b""
        """The end of what found room in part."""
        self._num_dropped = 0
        self._may_wait_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._encoded(record)
        except Exception:
            self.handleError(record)
            return
        if not self._flushed():
            self._num_dropped += 1
            return
        self._rest = data = self._told_dropped() + line
        if not self._flushed() and self._rest is data:
            self._rest = b""
            self._num_dropped += 1
        else:
            self._num_dropped = 0

    def close(self) -> None:
        super().close()
        self._end()

    def _told_dropped(self) -> bytes:
        if not self._num_dropped:
            return b""
        text = f"{self._num_dropped} lines of the log were dropped, as there was no room for them"
        told = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        return self._encoded(told)

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _flushed(self) -> bool:
        """Writes what is left. Returns False where there is no room for all of it."""
        while self._rest:
            try:
                self._rest = self._rest[self._write(self._rest) :]
            except BlockingIOError:
                if not self._has_room_soon():
                    return False
            except OSError as error:
                if error.errno in _FULL_DISK:
                    return False
                self._rest = b""  # Its reader has gone for good.
        return True

    def _has_room_soon(self) -> bool:
        now = time.monotonic()
        if now < self._may_wait_at:
            return False
        self._may_wait_at = now + _WAITS_EVERY_S
        room = select.poll()
        room.register(self._fd, select.POLLOUT)
        return bool(room.poll(_WAIT_S * 1e3))


def stderr_handler() -> logging.Handler:
    """Returns one for standard error as it is now: a pipe or a socket may be full for long."""
    with contextlib.suppress(OSError, ValueError):
        fd = sys.stderr.fileno()
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode):
            return _of_pipe(fd)
        if stat.S_ISSOCK(mode):
            return _of_socket(fd)
        if stat.S_ISREG(mode):
            return UnblockedHandler(fd, partial(os.write, fd), lambda: None)
    return logging.StreamHandler(sys.stderr)


def _of_pipe(fd: int) -> logging.Handler:
    # Flags are those of one opening: others that write to the pipe keep theirs.
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:  # It is another user's, as where a service gives its rights up.
        return UnblockedHandler(fd, partial(_write_at_once, fd), lambda: None)
    with contextlib.suppress(OSError):
        fcntl.fcntl(own, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return UnblockedHandler(own, partial(os.write, own), partial(os.close, own))


def _write_at_once(fd: int, data: bytes) -> int:
    """Writes to a pipe of which others share the flags. Raises `OSError`."""
    try:
        return os.pwritev(fd, [data], -1, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE):
            raise
    # A kernel before 6.5. A pipe with any room has it for PIPE_BUF bytes.
    room = select.poll()
    room.register(fd, select.POLLOUT)
    if not room.poll(0):
        raise BlockingIOError
    return os.write(fd, data[: select.PIPE_BUF])


def _of_socket(fd: int) -> logging.Handler:
    own = socket.socket(fileno=os.dup(fd))
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    return UnblockedHandler(own.fileno(), lambda data: own.send(data, flags), own.close)
