"""Routers and nodes as processes of their own, to be killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.local_cluster.cluster import free_ports
from tests.router.cluster import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def run_module(
    module: str, *args: str, stdout: Any = asyncio.subprocess.PIPE
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *args, cwd=ROOT,
        stdout=stdout, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
            process.send_signal(signal.SIGCONT)
        await process.communicate()


def router_process(*args: str, port: int = 0) -> Any:
    return run_module("router", "--port", str(port), *args)


async def ready_line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Returns the first line that a process prints."""
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        line: dict[str, Any] = json.loads(await process.stdout.readline())
    return line


@dataclass
class TokenProcess:
    """A `token_server` that comes back at the same ports, which nobody takes in between."""

    gap_s: float
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    process: asyncio.subprocess.Process | None = None
    _stack: list[Any] = field(default_factory=list)

    @property
    def entry(self) -> str:
        return f"127.0.0.1:{self.ports[0]}/{self.ports[1]}"

    async def start(self) -> TokenProcess:
        running = run_module("tests.router.token_server", str(self.gap_s), *map(str, self.ports))
        self.process = await running.__aenter__()
        self._stack.append(running)
        await ready_line(self.process)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def restart(self) -> None:
        """Whatever state it is in, it dies first."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        while self._stack:
            await self._stack.pop().__aexit__(None, None, None)
