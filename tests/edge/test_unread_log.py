"""A log that nothing reads holds up no service."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

NUM_LINES = 30_000
PROGRAM = f"""
import logging, sys
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


@pytest.mark.parametrize("make", [pipe, stream])
def test_lines_that_nothing_reads_are_dropped_and_counted(
    make: Callable[[], tuple[int, int]],
) -> None:
    """The process stood still, with its streams and its answers to probes."""
    ours, theirs = make()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
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
