"""Writes a file about the death of an engine, to be looked into later.

    1. `begin`: the engine has said that it dies, was killed, or is given up. The file has a name
       from now on, which logs and errors can tell
    2. an engine core that lives and has said nothing is asked to describe itself
    3. processes and their stacks are looked at, in a thread; the core and its workers stay for that
    4. the file is written whole, older ones beyond `_MAX_REPORTS` go; `release_core`: the core ends
    5. `finished`

Nothing of it fails the node: what cannot be found out is missing in the file, and a file that
cannot be written is an error in the log. No step takes longer than about a second.

The file says when, why and what was going on, in numbers; `crash_facts` of the contracts says what
it never has.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from edge.standstill import is_done_within
from engine.config import EngineConfig
from engine.contracts.outputs import SchedulerStats
from engine.contracts.reports.crash_facts import EngineFacts, RequestFacts, StepFacts, to_json
from engine.contracts.steps.step_log import StepLog, StepRecord
from host.process_facts import ProcessFacts, descendants_of, facts_of, memory_facts
from host.stack_dump import dump_stacks, install_stack_dumps

logger = logging.getLogger(__name__)

_MAX_REPORTS = 16
_DESCRIBE_TIMEOUT_S = 1.0
_DESCRIBE_LOOKS = 10
_PREFIX = "tandem-crash-"
_LIBRARIES = ("tandem", "torch", "triton", "numpy", "pyzmq", "msgspec", "grpcio", "ray")
_REQUESTS_TOLD = 512
_STEPS_TOLD = 64

FrontendFacts = tuple[list[RequestFacts], SchedulerStats]
"""The node server's own view: its open requests, and the latest statistics that it has received."""


class CrashReporter:
    """Reports on one engine, at most once. `ask` sends the engine core `DescribeEngine`;
    `release_core` lets a dying one end."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        core_pid: int,
        step_log: StepLog,
        ask: Callable[[], None],
        release_core: Callable[[], None],
    ) -> None:
        install_stack_dumps()
        self.path = ""
        """The report's name, once the engine is dead."""
        self.frontend: Callable[[], FrontendFacts] = lambda: ([], SchedulerStats())
        self._config = config
        self._folder = Path(folder)
        self._core_pid = core_pid
        self._step_log = step_log
        self._ask = ask
        self._release_core = release_core
        self._started_at = time.monotonic()
        self._description: asyncio.Future[EngineFacts] | None = None
        self._writing: asyncio.Task[None] | None = None

    def begin(self, reason: str, facts: EngineFacts | None, *, is_alive: bool) -> None:
        """Begins the report and returns at once. `facts`: what the engine core has said already;
        `is_alive`: it may be asked. Only the first call counts."""
        if self.path:
            return
        now = datetime.now(UTC)
        name = f"{_PREFIX}{now:%Y%m%dT%H%M%S}-{self._config.engine_id}.json"
        self.path = str((self._folder / name).absolute())
        head = {
            "format": 1,
            "written_at": now.isoformat(),
            "engine_id": self._config.engine_id,
            "reason": reason,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
        }
        loop = asyncio.get_running_loop()
        requests, stats = self.frontend()
        if facts is None and is_alive:
            self._description = loop.create_future()
            self._ask()
        body = {
            "open_requests": requests[:_REQUESTS_TOLD],
            "num_open_requests": len(requests),
            "last_stats": stats,
        }
        self._writing = loop.create_task(self._run(head, facts, body))

    def on_description(self, facts: EngineFacts) -> None:
        """Handles a message of the engine core."""
        if self._description is not None and not self._description.done():
            self._description.set_result(facts)

    async def finished(self) -> None:
        """Returns when the report is written, if there is one to write."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _run(
        self, head: dict[str, Any], facts: EngineFacts | None, body: dict[str, Any]
    ) -> None:
        try:
            if self._description is not None:
                facts = await self._described(self._description)
            await asyncio.to_thread(self._write, head, facts, body)
        except Exception:
            logger.exception("the crash report %s cannot be written", self.path)
        finally:
            self._release_core()

    async def _described(self, description: asyncio.Future[EngineFacts]) -> EngineFacts | None:
        """Waits in short sleeps: after a stall of this process the answer is there to be read."""
        if await is_done_within(_DESCRIBE_TIMEOUT_S, _DESCRIBE_LOOKS, description):
            return description.result()
        return None

    def _write(self, head: dict[str, Any], facts: EngineFacts | None, body: dict[str, Any]) -> None:
        """Looks at processes and writes the file; runs in a thread."""
        now = time.monotonic()
        steps = [_facts_of(step, now) for step in self._step_log.steps()[-_STEPS_TOLD:]]
        names = facts.names if facts is not None else {}
        report = {
            **head,
            "core_answered": facts is not None,
            "exceptions": facts.exceptions if facts is not None else {},
            "steps": steps,
            "engine": None if facts is None else _without(facts, "names", "exceptions"),
            **body,
            "memory": memory_facts(),
            "processes": self._processes(names),
            "versions": _versions(),
            "settings": settings_of(self._config),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = Path(self.path)
        part = path.with_suffix(".part")
        try:
            part.write_bytes(to_json(report))
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        for old in sorted(self._folder.glob(f"{_PREFIX}*.json"))[:-_MAX_REPORTS]:
            old.unlink(missing_ok=True)
        logger.error("crash report: %s", self.path)

    def _processes(self, names: dict[int, str]) -> list[ProcessFacts]:
        us = {os.getpid(): "the node server", self._core_pid: "the engine core"}
        pids = dict.fromkeys([*us, *descendants_of(self._core_pid), *names])
        found = [facts for pid in pids if (facts := facts_of(pid)) is not None]
        stacks = dump_stacks(one.pid for one in found if one.state not in "TtZX")
        for one in found:
            one.name = us.get(one.pid) or names.get(one.pid, "a process of the engine")
            one.stack = stacks.get(one.pid, [])
        return found


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Returns the engine's settings as they are, but those that say where secrets are kept."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    settings["model"].pop("spec")
    settings["cache"]["kv_scales"] = config.cache.kv_scales is not None
    if settings["kv_transfer"] is not None:
        settings["kv_transfer"].pop("security")
    return settings


def _facts_of(step: StepRecord, now: float) -> StepFacts:
    ended = step.ended_at
    return StepFacts(
        step_id=step.step_id,
        num_rows=step.rows,
        num_tokens=step.tokens,
        num_prompt_tokens=step.prompt_tokens,
        seconds_ago=round(now - step.issued_at, 6),
        seconds=round(ended - step.issued_at, 6) if ended else None,
    )


def _without(facts: EngineFacts, *names: str) -> dict[str, Any]:
    return {
        name: value for name, value in msgspec.structs.asdict(facts).items() if name not in names
    }


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "kernel": platform.release()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
