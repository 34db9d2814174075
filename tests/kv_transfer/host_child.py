"""A child for the tests of host processes. Does what its configuration says."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import msgspec

from host.child_process import ChildProcess, read_config
from host.futex import FutexWord
from host.memory_file import MemoryFile
from host.termination import termination_fd

MODULE = "tests.kv_transfer.host_child"


class ChildConfig(msgspec.Struct):
    """Tells the child its `action`: exit, sleep, stubborn, gentle, nest or count."""

    action: str
    pid: int = 0
    fd: int = 0
    rounds: int = 0


def main() -> None:
    config = read_config(ChildConfig)
    match config.action:
        case "exit":
            sys.exit(7)
        case "sleep":
            _say_ready()
            time.sleep(600)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _say_ready()
            time.sleep(600)
        case "gentle":
            descriptor = termination_fd()
            _say_ready()
            select.select([descriptor], [], [])
            sys.exit(3)
        case "nest":
            grandchild = ChildProcess.start(MODULE, ChildConfig("sleep"), "grandchild")
            print(grandchild.pid, flush=True)
            time.sleep(600)
        case "count":
            _count(config)


def _say_ready() -> None:
    print(os.getpid(), flush=True)


def _count(config: ChildConfig) -> None:
    """Adds one to the answer each time that the question was raised."""
    memory = MemoryFile.attach(config.pid, config.fd)
    question, answer = FutexWord(memory.buffer, 0), FutexWord(memory.buffer, 64)
    for number in range(1, config.rounds + 1):
        while (seen := question.value) < number:
            question.wait(seen, 60.0)
        answer.value = number
        answer.wake()


if __name__ == "__main__":
    main()
