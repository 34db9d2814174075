"""Keeps the processes of a local cluster running.

Life of a service:

    1. STARTING   the process exists; it reports progress as JSON lines on standard output
    2. READY      it reported `{"event": "ready", ...}`: it answers requests
    3. RESTARTING it died after it had been ready; started again after a growing pause
    4. FAILED     it died before it was ever ready: its final messages are the error
    5. STOPPED    it was asked to end (SIGTERM; SIGKILL when it takes longer than it should) and has
                  ended

Services run in sessions of their own: a Ctrl-C in the terminal reaches the supervisor alone,
which then stops them in order. If the supervisor itself is killed, the kernel ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from host.child_process import describe_exit, environment_with
from host.memory import num_killed_for_memory
from host.termination import bound

_GIB = 1 << 30
_LAST_WORDS = 25
_STOP_TIMEOUT_S = 20.0
"""Seconds that a process has to end once its open answers have ended: for these it says itself how
long it waits."""


class ServiceState(enum.Enum):
    """See the module docstring."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class ServiceFailed(Exception):
    """A service ended before it was ready. The message carries what it said last."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Says how to start one service.

    Attributes:
        endpoint: Where others reach it, for people to read.
        env: Variables that it has besides ours.
        stop_stage: Services of one stage are stopped together, a lower stage before a higher.
    """

    name: str
    argv: tuple[str, ...]
    endpoint: str
    stop_stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Listener:
    """Is called with everything that happens, from any service at any time."""

    on_state: Callable[[Service], None] = lambda service: None
    on_progress: Callable[[Service, str, float], None] = lambda service, stage, fraction: None
    on_log: Callable[[Service, str], None] = lambda service, line: None


@dataclass(slots=True)
class Service:
    """One supervised process."""

    spec: ServiceSpec
    listener: Listener
    max_pause_s: float = 15.0
    state: ServiceState = ServiceState.STARTING
    restarts: int = 0
    ready_info: dict[str, Any] = field(default_factory=dict)
    _process: asyncio.subprocess.Process | None = None
    _last_words: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))
    _stopping: bool = False
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a process is made, so that none is missed by `stop`."""
    _stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _first_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _killed_before: int = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Starts the process, and again whenever it dies. Raises `ServiceFailed` (FAILED)."""
        pause_s = 0.5
        while not self._stopping:
            started_at = time.monotonic()
            exit_code = await self._run_once()
            if self._stopping:
                break
            if not self._first_ready.is_set():
                self._change(ServiceState.FAILED)
                raise ServiceFailed(self._describe_failure(exit_code))
            self.restarts += 1
            self._change(ServiceState.RESTARTING)
            self.listener.on_log(self, f"{self._end_of(exit_code)}; starting it again")
            pause_s = (
                0.5 if time.monotonic() - started_at > 60 else min(2 * pause_s, self.max_pause_s)
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), pause_s)
        self._change(ServiceState.STOPPED)

    async def wait_ready(self) -> None:
        await self._first_ready.wait()

    async def stop(self) -> None:
        """Ends the process, gently first. Idempotent."""
        self.expect_end()
        async with self._starting:
            process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            drain_s = float(self.ready_info.get("drain_s", 0.0))
            await asyncio.wait_for(process.wait(), drain_s + _STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def expect_end(self) -> None:
        """Makes an end of the process no failure from now on: another service has failed."""
        self._stopping = True
        self._stop_requested.set()

    def kill(self) -> None:
        """Ends the process at once; its children end with it."""
        self.expect_end()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run_once(self) -> int:
        async with self._starting:
            if self._stopping:
                return 0
            self._killed_before = num_killed_for_memory()
            process = self._process = await self._start()
        assert process.stdout is not None and process.stderr is not None
        await asyncio.gather(self._read_events(process.stdout), self._read_log(process.stderr))
        return await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *bound(self.spec.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment_with(self.spec.env),
            start_new_session=True,
            limit=1 << 20,
        )

    async def _read_events(self, stream: asyncio.StreamReader) -> None:
        async for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and "event" in event:
                self._on_event(event)
            elif line:
                self._on_line(line)

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        async for raw in stream:
            if line := raw.decode(errors="replace").rstrip():
                self._on_line(line)

    def _on_line(self, line: str) -> None:
        self._last_words.append(line)
        self.listener.on_log(self, line)

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self.ready_info = event
            self._first_ready.set()
            self._change(ServiceState.READY)
        elif event["event"] == "progress":
            stage, fraction = str(event["stage"]), float(event["fraction"])
            if total := int(event.get("total_bytes", 0)):
                stage += f", {fraction * total / _GIB:.1f} of {total / _GIB:.1f} GiB"
            self.listener.on_progress(self, stage, fraction)

    def _change(self, state: ServiceState) -> None:
        self.state = state
        self.listener.on_state(self)

    def _describe_failure(self, exit_code: int) -> str:
        words = "\n".join(f"    {line}" for line in self._last_words)
        return f"{self.spec.name} could not start: it {self._end_of(exit_code)}\n{words}"

    def _end_of(self, exit_code: int) -> str:
        return describe_exit("", exit_code, self._killed_before).strip()


class Supervisor:
    """Runs services until asked to stop, or until one cannot start. `max_pause_s`: before one that
    dies again and again is started again."""

    def __init__(
        self, specs: Sequence[ServiceSpec], listener: Listener, max_pause_s: float = 15.0
    ) -> None:
        self.services = [Service(spec, listener, max_pause_s) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all at once and returns when all are ready. Raises `ServiceFailed`."""
        self._tasks = [asyncio.create_task(self._run(service)) for service in self.services]
        ready = asyncio.create_task(self._wait_all_ready())
        failed = asyncio.create_task(self.wait_failed())
        try:
            await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await failed
        finally:
            ready.cancel()
            failed.cancel()

    async def _run(self, service: Service) -> None:
        """Runs one service. The first that fails is the one at fault; what the others do then is
        no news."""
        try:
            await service.run()
        except ServiceFailed:
            for other in self.services:
                other.expect_end()
            raise

    async def _wait_all_ready(self) -> None:
        for service in self.services:
            await service.wait_ready()

    async def wait_failed(self) -> None:
        """Returns only by raising the `ServiceFailed` of whichever service fails."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Ends all services, stage after stage, and waits for them. Idempotent."""
        for stage in sorted({service.spec.stop_stage for service in self.services}):
            members = [s for s in self.services if s.spec.stop_stage == stage]
            await asyncio.gather(*(service.stop() for service in members))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Makes a `stop` that is under way end at once."""
        for service in self.services:
            service.kill()
