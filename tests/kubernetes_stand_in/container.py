"""One container of a pod, over all its runs.

    waiting ──▶ running ──startup probe──▶ started ──readiness probe──▶ ready ⇄ not ready
       ▲           │                          │
       │           └── ends by itself, or the startup or liveness probe gives up ──┐
       │                                                                            ▼
       └───────── after a pause, if the pod's restartPolicy says so ─────────── terminated

`stop` (the pod is deleted): preStop hook, SIGTERM, SIGKILL, all within the pod's grace period.
Readiness is probed until the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kubernetes_stand_in.container_command import Command, CommandBuilder
from tests.kubernetes_stand_in.container_process import ContainerProcess, run_to_end
from tests.kubernetes_stand_in.object_store import now
from tests.kubernetes_stand_in.pod_files import MountError, MountPaths
from tests.kubernetes_stand_in.probes import Prober
from tests.kubernetes_stand_in.resources import Object

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
"""Shorter than a real kubelet's 10 s and 300 s: tests wait for them."""
_LAST_GRACE_S = 2.0
"""The seconds that the process has left when its preStop hook used up all of the grace period."""


class Container:
    """`run` until it is over; `on_change` is called whenever `status` differs."""

    def __init__(
        self,
        pod: Object,
        spec: Object,
        builder: CommandBuilder,
        mounts: MountPaths,
        folder: Path,
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._builder = builder
        self._mounts = mounts
        self._folder = folder
        self._on_change = on_change
        self._restart_policy = pod["spec"].get("restartPolicy", "Always")
        self._prober = Prober(spec, pod["status"]["podIP"], self._exec)
        self._process: ContainerProcess | None = None
        self._command: Command | None = None
        self._is_stopping = False
        self.state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
        self.restarts = 0
        self.is_started = False
        self.is_ready = False
        self.exit_code: int | None = None
        """Set when it ended for good."""

    @property
    def status(self) -> dict[str, Any]:
        return {
            "name": self._spec["name"],
            "image": self._spec.get("image", ""),
            "state": self.state,
            "started": self.is_started,
            "ready": self.is_ready,
            "restartCount": self.restarts,
        }

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self) -> int:
        """Does all runs, until none follows; returns the last exit code."""
        pause_s = _FIRST_PAUSE_S
        while True:
            code = await self._run_once()
            if self._is_stopping or not self._starts_again(code):
                self.exit_code = code
                return code
            self.restarts += 1
            self._set_state({"waiting": {"reason": "CrashLoopBackOff"}})
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def stop(self, grace_s: float) -> None:
        """Returns when its process has ended."""
        self._is_stopping = True
        deadline = time.monotonic() + grace_s
        if self._process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._pre_stop(grace_s)
        left_s = max(_LAST_GRACE_S, deadline - time.monotonic())
        await self._process.terminate(left_s)

    def kill(self) -> None:
        self._is_stopping = True
        if self._process is not None:
            self._process.kill()

    def log(self) -> str:
        path = self._log_path
        return path.read_text(errors="replace") if path.exists() else ""

    # One run -----------------------------------------------------------------------------------

    @property
    def _log_path(self) -> Path:
        return self._folder / f"{self._spec['name']}.log"

    async def _run_once(self) -> int:
        try:
            self._command = self._builder.build(self._spec, self._mounts)
        except MountError as error:
            self._set_state({"waiting": {"reason": "CreateContainerConfigError"}})
            self._log_path.write_text(f"{error}\n")
            return 1
        process = await ContainerProcess.start(self._command, self._folder, self._log_path)
        self._process = process
        self._set_state({"running": {"startedAt": now()}})
        watching = asyncio.create_task(self._watch(process))
        try:
            code = await process.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self.is_started = self.is_ready = False
        reason = "Completed" if code == 0 else "Error"
        self._set_state({"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}})
        return code

    async def _watch(self, process: ContainerProcess) -> None:
        """Runs the probes of one run; a probe that gives up ends the run."""
        if not await self._prober.wait_started():
            await process.terminate(_LAST_GRACE_S)
            return
        self.is_started = True
        self._set_ready("readinessProbe" not in self._spec)
        is_failing = asyncio.Event()
        liveness = self._prober.watch(
            "livenessProbe", lambda alive: None if alive else is_failing.set()
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prober.watch("readinessProbe", self._set_ready))
            group.create_task(liveness)
            await is_failing.wait()
            await process.terminate(_LAST_GRACE_S)

    def _starts_again(self, code: int) -> bool:
        return self._restart_policy == "Always" or (
            self._restart_policy == "OnFailure" and code != 0
        )

    async def _pre_stop(self, grace_s: float) -> None:
        hook = self._spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        elif "exec" in hook:
            await self._exec(hook["exec"]["command"], grace_s)

    async def _exec(self, command: list[str], timeout_s: float) -> int:
        assert self._command is not None
        argv = self._builder.exec_argv(self._spec, command, self._mounts)
        return await run_to_end(replace(self._command, argv=argv), self._folder, timeout_s)

    def _set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        self._on_change()

    def _set_state(self, state: dict[str, Any]) -> None:
        self.state = state
        self._on_change()
