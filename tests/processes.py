"""Lists the processes below another one: for tests that kill some and count what is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator

import psutil

from cli.local_cluster.cluster import free_ports
from tests.forked_programs import STORE


def descendants(root: int) -> set[int]:
    """Returns all that live below `root`, without it and without what forks programs for tests;
    empty when `root` is gone."""
    try:
        below = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    return {p.pid for p in below if is_alive(p.pid) and not is_store(p.pid)}


def is_store(pid: int) -> bool:
    """Returns whether this is a process that forks programs for tests."""
    return _command(pid).startswith(STORE)


def find_processes(root: int, pattern: str) -> list[int]:
    """Returns those below `root` whose command line matches, in order of their ids."""
    return sorted(pid for pid in descendants(root) if re.search(pattern, _command(pid)))


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def is_alive(pid: int) -> bool:
    """A process that ended and that nobody has waited for is not alive."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(pid: int) -> bool:
    """It ended, and its parent has taken note."""
    return not psutil.pid_exists(pid)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process meanwhile: whatever waits for it stays as it is. It may be killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def free_address() -> str:
    """Returns an address of this host at which nobody listens, and that nobody else is given before
    the caller's process does."""
    return f"127.0.0.1:{free_ports(1)[0]}"
