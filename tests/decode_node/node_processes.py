"""Node processes with the demo checkpoint, as a supervisor starts them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.processes import find_processes

TIMEOUT_S = 90.0
_COMMON = ("--device", "cpu", "--num-threads", "1", "--num-blocks", "256", "--max-num-seqs", "16")
_PATIENT = ("--handshake-timeout-s", "10")
"""Flags of who decodes: a prompt shall not be computed there because a prefill node was paused."""


@dataclass
class NodeProcess:
    """A node's process. `events` are the JSON lines of standard output so far, `log` is standard
    error."""

    process: asyncio.subprocess.Process
    events: list[dict[str, Any]]
    log: list[str]
    _readers: list[asyncio.Task[None]]
    _ready: asyncio.Event

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == "ready")

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def freeze(self) -> None:
        """Stops it, and takes note of all that it has said before."""
        self.send(signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        for _ in range(10):  # Each turn of the loop reads what the pipes hold.
            await asyncio.sleep(0)

    async def wait_ready(self) -> None:
        """Raises AssertionError with the log when it ends instead."""
        ended = asyncio.create_task(self.process.wait())
        ready = asyncio.create_task(self._ready.wait())
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), "".join(self.log)
        ended.cancel()

    async def wait_event(self, name: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not any(event["event"] == name for event in self.events):
                await asyncio.sleep(0.01)

    async def wait_log(self, words: str) -> str:
        """Returns the first line of the log with these words."""
        async with asyncio.timeout(TIMEOUT_S):
            while not any(words in line for line in self.log):
                await asyncio.sleep(0.01)
        return next(line for line in self.log if words in line)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
            return code

    def descendants(self, module: str) -> list[int]:
        """Process ids below this one that run `python -m module`."""
        return find_processes(self.pid, re.escape(module))


@asynccontextmanager
async def node_process(module: str, model: Path | str, *args: str) -> AsyncIterator[NodeProcess]:
    """Killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--model", str(model), "--port", "0"),
        *(*_COMMON, *(() if module == "prefill_node" else _PATIENT), *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    node = NodeProcess(process, [], [], [], asyncio.Event())
    assert process.stdout is not None and process.stderr is not None
    node._readers += [
        asyncio.create_task(_read_events(node, process.stdout)),
        asyncio.create_task(_read_log(node, process.stderr)),
    ]
    try:
        yield node
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await asyncio.gather(*node._readers)


async def _read_events(node: NodeProcess, stream: asyncio.StreamReader) -> None:
    async for line in stream:
        node.events.append(json.loads(line))
        if node.events[-1]["event"] == "ready":
            node._ready.set()


async def _read_log(node: NodeProcess, stream: asyncio.StreamReader) -> None:
    async for line in stream:
        node.log.append(line.decode())
