"""One run of a container's command.

1. start     a session and process group of its own; its output goes to a file; where there is
             a cluster DNS, a mount namespace with its own /etc/resolv.conf
2. wait      for its end
3. terminate SIGTERM, and SIGKILL for the whole group after the grace period
-  however the tests end, the kernel ends it: it is bound to the life of the test process, and the
   services bind their own children to themselves
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import IO

from tests.kubernetes_stand_in import container_program
from tests.kubernetes_stand_in.container_command import Command

_SOURCE = Path(__file__).resolve().parents[2]
_started: set[tuple[str, ...]] = set()


def _has_started_alike(command: Command) -> bool:
    """Returns whether Python has started the same program of ours with variables of the same names
    before: then a fork of what tests have imported does. Its imports look at the tests' own."""
    if command.argv[:3] != [sys.executable, "-m", "cli"]:
        return False
    start = (command.argv[3], *sorted(command.env))
    has_started = start in _started
    _started.add(start)
    return has_started


async def _spawn(command: Command, folder: Path, output: int | IO[bytes]) -> Process:
    given = {
        "parent": os.getpid(),
        "resolv_conf": command.resolv_conf,
        "cwd": str(folder),
        "argv": command.argv,
        "env": command.env,
    }
    forked, real = ["-m", container_program.MODULE], ["-S", container_program.__file__]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(forked if _has_started_alike(command) else real),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, container_program.GIVEN: json.dumps(given)},
        cwd=_SOURCE,
        start_new_session=True,
    )


class ContainerProcess:
    """Start it with `await ContainerProcess.start(...)`."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self.log = log
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Command, folder: Path, log: Path) -> ContainerProcess:
        with log.open("ab") as output:
            process = await _spawn(command, folder, output)
        return cls(process, log)

    async def wait(self) -> int:
        """Returns the exit code; 128 + signal when one ended it, as a container runtime says it."""
        code = await self._process.wait()
        self.kill()
        return 128 - code if code < 0 else code

    async def terminate(self, grace_s: float) -> None:
        """Returns when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Kills it at once, with everything that it has started in its group. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def run_to_end(command: Command, folder: Path, timeout_s: float) -> int:
    """Returns the exit code of a probe's or hook's command; 124 when its time was over."""
    process = await _spawn(command, folder, asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    except TimeoutError:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
