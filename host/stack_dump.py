"""Stacks of all threads of our processes, from outside: also of one whose interpreter is stuck.

    each process                                   who wants to know
    1. `install_stack_dumps`: SIGUSR2 writes the
       stacks into an anonymous file of its own
                                                   2. `dump_stacks(pids)`: finds that file among the
    3. faulthandler writes, without the GIL ◀────     open ones of each, signals, waits, reads

Only processes that have such a file are signalled: for others SIGUSR2 would be the end. A process
that is stopped, or waits in the kernel for a device, writes nothing. faulthandler reads frames that
other threads may be changing, and has crashed a process by that; so our own stacks, which need no
signal, are read by the interpreter. Stacks name files, lines and functions, never values.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

_NAME = "tandem-stacks"
_POLL_S = 0.02
_installed_fd = -1


def install_stack_dumps() -> None:
    """Lets others ask this process for its stacks. Idempotent."""
    global _installed_fd
    if _installed_fd < 0:
        _installed_fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        faulthandler.register(signal.SIGUSR2, file=_installed_fd, all_threads=True, chain=False)


def dump_stacks(pids: Iterable[int], timeout_s: float = 1.0) -> dict[int, list[str]]:
    """Returns the lines of each process's stacks, newest call first; of one that has written
    nothing after `timeout_s`, none. Processes that have ended or cannot be asked are left out."""
    asked: dict[int, tuple[Path, int]] = {}
    writers: dict[int, list[Path]] = {}
    own: dict[int, list[str]] = {}
    for pid in pids:
        if pid == os.getpid():
            own[pid] = _own_stacks()
            continue
        file = _file_of(pid)
        if file is None:
            continue
        try:
            asked[pid] = (file, file.stat().st_size)
            writers[pid] = [thread for thread in _threads_of(pid) if _takes_signal(thread)]
            os.kill(pid, signal.SIGUSR2)
        except OSError:
            asked.pop(pid, None)
    sizes: dict[int, int] = {}
    settled: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while len(settled) < len(asked) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for pid, (file, before) in asked.items():
            size = _size(file)
            is_still = size > before and size == sizes.get(pid)
            # The thread that writes takes no second signal meanwhile.
            if size < 0 or (is_still and all(_takes_signal(one) for one in writers[pid])):
                settled.add(pid)
            sizes[pid] = size
    return own | {pid: _read(*asked[pid]) for pid in asked}


def _own_stacks() -> list[str]:
    """Returns them as faulthandler writes those of others."""
    lines: list[str] = []
    for thread, frame in sys._current_frames().items():
        lines += ["", f"Thread {thread:#018x} (most recent call first):"]
        for found, line in traceback.walk_stack(frame):
            code = found.f_code
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
    return lines[1:]


def _file_of(pid: int) -> Path | None:
    """Returns the file into which a process writes its stacks."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    for link in links:
        with contextlib.suppress(OSError):  # It was closed meanwhile, as the folder itself was.
            if str(link.readlink()).startswith(f"/memfd:{_NAME}"):
                return link
    return None


def _threads_of(pid: int) -> list[Path]:
    return [task / "status" for task in Path(f"/proc/{pid}/task").iterdir()]


def _takes_signal(status: Path) -> bool:
    """Returns False for a thread that blocks ours. One that has ended stands in none's way."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return True
    blocked = next((line.split()[1] for line in lines if line.startswith("SigBlk:")), "0")
    return not int(blocked, 16) >> (signal.SIGUSR2 - 1) & 1


def _size(file: Path) -> int:
    """Returns -1 when the process has ended."""
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _read(file: Path, before: int) -> list[str]:
    try:
        with file.open("rb") as opened:
            opened.seek(before)
            return opened.read().decode(errors="replace").splitlines()
    except OSError:
        return []
