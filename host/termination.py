"""How processes of ours end: when they are asked to, and with the process that started them.

SIGTERM is something to poll, instead of something that strikes in the middle of a statement.

The kernel ends a child with its parent. Children of ours ask for it (`die_with_parent`); for other
commands this file does, run by a bare Python:

    parent                                          child
    1. starts bound(argv): the kernel's own spawn ▶ 2. die_with_parent
                                                    3. becomes `argv`

A `preexec_fn` would do it between fork and exec, where a process with threads of gRPC must run
nothing: its handlers of forks start some of them again, which find locks and memory as the other
threads left them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1


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


def bound(argv: Sequence[str]) -> list[str]:
    """Returns a command that becomes `argv`, in the same process, and ends with the thread that
    starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def die_with_parent(parent_pid: int | None = None) -> None:
    """The kernel sends us SIGKILL when the thread that started us ends.

    `parent_pid`: who started us; it may have ended already. None: our parent now.
    """
    parent_pid = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process has ended")


if __name__ == "__main__":
    _, _parent, *_argv = sys.argv
    die_with_parent(int(_parent))
    os.execvp(_argv[0], _argv)
