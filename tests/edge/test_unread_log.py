"""A log that nothing reads, or that finds no room, holds up no service."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.logs.unblocked import UnblockedHandler

NUM_LINES = 30_000
PROGRAM = f"""
import logging, os, sys
if sys.argv[1:]:  # The pipe is another user's, and on an older kernel.
    def refuse(*args):
        raise PermissionError
    os.open = refuse
if "old" in sys.argv:
    def lack(*args):
        raise OSError(95, "Operation not supported")
    os.pwritev = lack
from edge.logs.setup import LogStyle, setup_logging
setup_logging(LogStyle(), "router")
logger = logging.getLogger("router")
for number in range({NUM_LINES}):
    logger.info("line %d %s", number, "x" * 80)
print("done", flush=True)
sys.stdin.readline()
logger.info("at last")
print("done", flush=True)
sys.stdin.readline()
"""


def pipe() -> tuple[int, int]:
    return os.pipe()


def stream() -> tuple[int, int]:
    """Returns ends as a service of systemd has them."""
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize(
    ("make", "options"), [(pipe, []), (pipe, ["foreign"]), (pipe, ["foreign", "old"]), (stream, [])]
)
def test_lines_that_nothing_reads_are_dropped_and_counted(
    make: Callable[[], tuple[int, int]], options: list[str]
) -> None:
    """The process stood still, with its streams and its answers to probes."""
    ours, theirs = make()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    assert program.stdin is not None and program.stdout is not None
    found = b""
    try:
        assert program.stdout.readline() == "done\n"
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                found += os.read(ours, 1 << 20)
        os.set_blocking(ours, True)
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        while b"at last" not in found:
            found += os.read(ours, 1 << 20)
    finally:
        program.kill()
        program.communicate()
        os.close(ours)
    *kept, told, last = found.decode().splitlines()
    assert [line.split()[4:6] for line in kept] == [["line", str(i)] for i in range(len(kept))]
    assert all(line.endswith("x" * 80) for line in kept)
    assert f" {NUM_LINES - len(kept)} lines of the log were dropped" in told
    assert last.endswith("at last")


class Disk:
    """Takes what it has room for."""

    def __init__(self) -> None:
        self.room = 0
        self.taken = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(self.room, len(data))
        self.room -= count
        self.taken += data[:count]
        return count


def test_a_full_disk_costs_lines_and_cuts_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line cost a traceback, and its part that had found room was there."""
    disk = Disk()
    handler = UnblockedHandler(-1, disk.write, lambda: None)
    logger = logging.Logger("disk")
    logger.addHandler(handler)
    disk.room = 8
    logger.info("first line")
    for _ in range(3):
        logger.info("lost")
    disk.room = 1000
    logger.info("last line")
    first, dropped, last = disk.taken.decode().splitlines()
    assert (first, last) == ("first line", "last line")
    assert dropped == "3 lines of the log were dropped, as there was no room for them"
    assert capsys.readouterr() == ("", "")


def test_a_file_gets_all_lines(tmp_path: Path) -> None:
    program = "import logging, sys; from edge.logs.setup import *; setup_logging(LogStyle(), 'a'); "
    program += "logging.info('first'); print('second', file=sys.stderr); logging.info('third'); "
    program += "print([type(one).__name__ for one in logging.getLogger().handlers])"
    with (tmp_path / "log").open("wb") as log:
        told = subprocess.check_output([sys.executable, "-c", program], stderr=log, text=True)
    assert "UnblockedHandler" in told
    words = [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()]
    assert words == ["first", "second", "third"]
