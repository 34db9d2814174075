"""Processes on the hosts of a Ray cluster.

    driver (engine core)                           Ray worker process, one for each rank
    1. RayHost.start ─────────────────────────────▶ RankActor.start: a child process, with the
                                                    GPU that Ray has given to the actor
    2. RayProcess.sentinel  ◀── its end, or ──────  RankActor.wait
       the end of the actor or of its host
    3. RayProcess.terminate, reap ────────────────▶ RankActor.signal

An actor does nothing but start, watch and end children: the worker itself, and the transfer
processes that map its memory. They end with it, since the kernel ends children with their parent
(`host.child_process`). Ray carries no step, no token and no KV.

Ray pickles what it carries. Here that is text, numbers and bytes, nothing else.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle

from edge.installed_version import installed_version
from host.child_process import ChildProcess, HostedProcess, describe_exit
from host.sockets.secure_socket import HostLink

_NAMESPACES = ("pid", "net", "user")
_KILL_TIMEOUT_S = 5.0
_STATE_TIMEOUT_S = 1.0
_LOST = -signal.SIGKILL
"""Exit code of a process whose actor or host has gone: nothing of it runs any more."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what an actor reports about the place where it runs.

    Attributes:
        address: The host's address within the cluster.
        node_id: Ray's name of the host.
        sharing: Equal exactly for processes that can map each other's memory and share the names
            of sockets: kernel, namespaces and user.
        version: Of tandem.
    """

    address: str
    node_id: str
    sharing: str
    version: str

    @classmethod
    def gather(cls) -> HostFacts:
        """Collects the facts about this process, which must be connected to Ray. It must be
        connected to Ray.
        """
        context = ray.get_runtime_context()
        namespaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in _NAMESPACES]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            address=ray.util.get_node_ip_address(),
            node_id=context.get_node_id(),
            sharing=f"{boot} {namespaces} {os.getuid()}",
            version=installed_version(),
        )


class RankActor:
    """Runs in Ray's worker process, all methods in one event loop and so in one thread, which
    lives as long as the process: children need that."""

    def __init__(self) -> None:
        self._children: dict[int, ChildProcess] = {}
        """The children by process id, until `wait` has reported their end."""

    async def facts(self) -> bytes:
        return msgspec.json.encode(HostFacts.gather())

    async def start(self, module: str, config: bytes, name: str, env: bytes) -> int:
        """Starts the child and returns its process id. `config`, `env`: JSON."""
        child = ChildProcess.start(module, msgspec.Raw(config), name, msgspec.json.decode(env))
        self._children[child.pid] = child
        return child.pid

    async def wait(self, pid: int) -> int:
        """Returns the child's exit code when it has ended."""
        child = self._children[pid]
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(child.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(child.sentinel)
        code = child.exit_code
        assert code is not None
        child.reap(0)
        del self._children[pid]
        return code

    async def signal(self, pid: int, number: int) -> None:
        """Sends a signal unless the child has ended: its process id may be another's by now."""
        child = self._children.get(pid)
        if child is not None and child.exit_code is None:
            os.kill(pid, number)

    async def state(self, pid: int) -> str:
        child = self._children.get(pid)
        return child.state if child is not None else "ended"


class RayProcess:
    """A child of a `RankActor`, with the face of `ChildProcess`. Its calls return at once but for
    `wait`, `stop`, `reap` and `state`."""

    def __init__(self, actor: ActorHandle[RankActor], name: str, started: Any) -> None:
        """Builds the handle; `started` is the pending result of `RankActor.start`."""
        self.name = name
        self.pid = 0
        """The process id; 0 until the child has been started."""
        self.sentinel = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._actor = actor
        self._started = started
        self._code: int | None = None
        self._loss = ""
        self._lock = threading.Lock()
        """Ray's threads tell of beginning and end; the sentinel must still be ours then."""
        started.future().add_done_callback(self._on_started)
        actor.wait.remote(started).future().add_done_callback(self._on_ended)

    def _on_started(self, started: Future[int]) -> None:
        if started.exception() is None:
            self.pid = started.result()

    def _on_ended(self, ended: Future[int]) -> None:
        error = ended.exception()
        with self._lock:
            if error is not None:
                self._loss = describe(error)
            self._code = ended.result() if error is None else _LOST
            if self.sentinel >= 0:
                os.eventfd_write(self.sentinel, 1)

    @property
    def exit_code(self) -> int | None:
        """Returns None while it runs; a negative number is the signal that ended it, SIGKILL also
        for the end of its actor or host.
        """
        return self._code

    @property
    def state(self) -> str:
        """Returns the same as `ChildProcess.state`, if its host answers."""
        try:
            found: str = ray.get(self._actor.state.remote(self._started), timeout=_STATE_TIMEOUT_S)
        except ray.exceptions.RayError:
            return "unknown, its host does not answer"
        return found

    def describe_exit(self) -> str:
        """Returns `worker 1 on 10.0.0.12 was killed by SIGKILL`, or says how its host was lost."""
        if self._loss:
            return f"{self.name} was lost with its Ray actor or host: {self._loss}"
        return describe_exit(self.name, self._code or 0)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` and returns whether the process has ended."""
        if self._code is None and self.sentinel >= 0:
            poller = select.poll()
            poller.register(self.sentinel, select.POLLIN)
            poller.poll(max(0.0, timeout_s) * 1000)
        return self._code is not None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the process, gently first. Idempotent."""
        self.terminate()
        self.reap(timeout_s)

    def terminate(self) -> None:
        if self._code is None:
            self._actor.signal.remote(self._started, signal.SIGTERM)

    def reap(self, timeout_s: float) -> None:
        """Kills it when it has not ended after `timeout_s`. A host that does not answer is given
        up: Ray ends the actor there, and with it the process. Idempotent."""
        if not self.wait(timeout_s):
            self._actor.signal.remote(self._started, signal.SIGKILL)
            self.wait(_KILL_TIMEOUT_S)
        with self._lock:
            if self.sentinel >= 0:
                os.close(self.sentinel)
                self.sentinel = -1


class RayHost:
    """Starts one rank on its host. `link` is None when that is beside the engine core."""

    def __init__(self, actor: ActorHandle[RankActor], link: HostLink | None) -> None:
        self.actor = actor
        self.link = link

    def start(
        self, module: str, config: Any, name: str, env: dict[str, str] | None = None
    ) -> HostedProcess:
        started: Any = self.actor.start.remote(
            module, msgspec.json.encode(config), name, msgspec.json.encode(env or {})
        )
        return RayProcess(self.actor, name, started)


def describe(error: BaseException) -> str:
    """Returns the first line of one of Ray's long messages, which says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
