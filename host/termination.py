"""SIGTERM as something to poll, instead of something that strikes in the middle of a statement."""

from __future__ import annotations

import os
import signal
from types import FrameType


def termination_fd() -> int:
    """Makes SIGTERM do nothing from now on but make the returned descriptor readable.

    Call once, in the main thread. SIGINT is left alone: `read_config` has ignored it, since a
    Ctrl-C in a terminal is the parent's to decide about.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _do_nothing)
    return reader


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """A handler must exist, or the signal would still end the process."""
