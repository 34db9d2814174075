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
import os
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import IO

from tests.kubernetes_stand_in.container_command import Command

# Runs between fork and the real program; preexec_fn would fork with gRPC's threads in our process.
_BECOME_CONTAINER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
PDEATHSIG, NEWNS, BIND, REC_PRIVATE = 1, 0x20000, 0x1000, 0x44000
def check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
parent, resolv_conf, *argv = sys.argv[1:]
check(libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0))
if os.getppid() != int(parent):
    raise SystemExit("the tests have ended")
if resolv_conf:
    check(libc.unshare(NEWNS))
    check(libc.mount(None, b"/", None, REC_PRIVATE, None))
    check(libc.mount(resolv_conf.encode(), b"/etc/resolv.conf", None, BIND, None))
os.execvp(argv[0], argv)
"""


async def _spawn(command: Command, folder: Path, output: int | IO[bytes]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-S",
        "-c",
        _BECOME_CONTAINER,
        str(os.getpid()),
        command.resolv_conf,
        *command.argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=command.env,
        cwd=folder,
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
