"""One run of a container's command.

1. start     a session and process group of its own; its output goes to a file
2. wait      for its end
3. terminate SIGTERM, and SIGKILL for the whole group after the grace period
-  however the tests end, the kernel ends it: it is bound to the life of the test process, and the
   services bind their own children to themselves
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from tests.helm.lifecycle.container_command import Command

# Runs between fork and the real program; preexec_fn would fork with gRPC's threads in our process.
_BIND_LIFE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    raise SystemExit("the tests have ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound_argv(argv: list[str]) -> list[str]:
    """`argv` in a process that ends with ours."""
    return [sys.executable, "-S", "-c", _BIND_LIFE, str(os.getpid()), *argv]


class ContainerProcess:
    """Start it with `await ContainerProcess.start(...)`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Command, folder: Path, log: Path) -> ContainerProcess:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *bound_argv(command.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=command.env,
                cwd=folder,
                start_new_session=True,
            )
        return cls(process, log)

    async def wait(self) -> int:
        """Exit code; 128 + signal when one ended it, as a container runtime says it."""
        code = await self._process.wait()
        self.kill()
        return 128 - code if code < 0 else code

    async def terminate(self, grace_s: float) -> None:
        """Returns when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """At once, with everything that it has started in its group. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def run_to_end(command: Command, folder: Path, timeout_s: float) -> int:
    """Exit code of a probe's or hook's command; 124 when its time was over."""
    process = await asyncio.create_subprocess_exec(
        *bound_argv(command.argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=command.env,
        cwd=folder,
        start_new_session=True,
    )
    try:
        return await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
