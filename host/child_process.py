"""Starting the processes of a node, and ending with them.

A child is the `main()` of a module in a Python of its own (`edge.program`): it inherits no state
of its parent, no thread and no lock, and nothing is pickled. Its configuration is one JSON message
on standard input.

    parent                                        child
    1. ChildProcess.start(module, config) ──────▶ 2. read_config(type): also binds its life to
                                                     the parent's (PR_SET_PDEATHSIG)
    3. sentinel (pidfd) is readable  ◀──────────── 4. it ends, for whatever reason
    5. stop(): SIGTERM, then SIGKILL

Signals: a child has a process group of its own and ignores SIGINT, so a Ctrl-C in the terminal
reaches only the process that the user started. That one decides, and ends its children.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from host.memory import num_killed_for_memory
from host.stack_dump import install_stack_dumps
from host.termination import die_with_parent

T = TypeVar("T")


class HostedProcess(Protocol):
    """A process that was started for us, on this host or on another one. See `ChildProcess`."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def sentinel(self) -> int: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def state(self) -> str: ...
    def describe_exit(self) -> str: ...
    def wait(self, timeout_s: float) -> bool: ...
    def stop(self, timeout_s: float = 5.0) -> None: ...
    def terminate(self) -> None: ...
    def reap(self, timeout_s: float) -> None: ...


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's variables and `more` for a child."""
    return {**os.environ, **more}


class ChildProcess:
    """A running child. `sentinel` is a file descriptor that is readable once it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self.name = name
        self.pid = process.pid
        self.sentinel = os.pidfd_open(process.pid)
        self._killed_before = num_killed_for_memory()

    @classmethod
    def start(
        cls,
        module: str,
        config: Any,
        name: str,
        env: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """`config` is anything that msgspec writes as JSON. `env` is added to our own. The child
        also has the open files `pass_fds`, by the same numbers.

        The caller's thread must live as long as the child: the kernel signals the child when
        the *thread* that started it ends.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "edge.program", module],
            stdin=subprocess.PIPE,
            env=environment_with(env or {}),
            process_group=0,
            pass_fds=pass_fds,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(b"%d\n" % os.getpid() + msgspec.json.encode(config))
            process.stdin.close()
        except BrokenPipeError:
            pass
        return cls(process, name)

    @property
    def exit_code(self) -> int | None:
        """Returns None while it runs; a negative number is the signal that ended it."""
        return self._process.poll()

    @property
    def state(self) -> str:
        """Returns the kernel's letter: R running, S sleeping, D in the kernel, T stopped, Z
        ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "unknown"

    def describe_exit(self) -> str:
        """Waits for the end. See `describe_exit`."""
        return describe_exit(self.name, self._process.wait(), self._killed_before)

    def wait(self, timeout_s: float) -> bool:
        """Returns whether the child has ended, after at most `timeout_s`."""
        if self.sentinel >= 0:
            poller = select.poll()
            poller.register(self.sentinel, select.POLLIN)
            poller.poll(max(0.0, timeout_s) * 1000)
        return self._process.poll() is not None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the child, gently first. Idempotent."""
        stop_all([self], timeout_s)

    def terminate(self) -> None:
        """Asks it to end, and returns at once."""
        if self._process.poll() is None:
            self._process.terminate()

    def reap(self, timeout_s: float) -> None:
        """Kills it when it has not ended after `timeout_s`. Idempotent."""
        if self.sentinel < 0:
            return
        if not self.wait(timeout_s):
            self._process.kill()
            self._process.wait()
        os.close(self.sentinel)
        self.sentinel = -1


def describe_exit(name: str, code: int, killed_before: int | None = None) -> str:
    """Returns `worker 0 was killed by SIGKILL` or `worker 0 ended with exit code 1`.
    `killed_before`: `num_killed_for_memory` as it began, if it ran on this host."""
    if code >= 0:
        return f"{name} ended with exit code {code}"
    named = {one.value: one.name for one in signal.Signals}
    text = f"{name} was killed by {named.get(-code, f'signal {-code}')}"
    if code != -signal.SIGKILL or killed_before is None:
        return text
    num_killed = num_killed_for_memory() - killed_before
    if num_killed <= 0:
        return text
    processes = "1 process" if num_killed == 1 else f"{num_killed} processes"
    return f"{text}: out of memory (the kernel has killed {processes} here since it began)"


def stop_all(children: Sequence[HostedProcess], timeout_s: float = 5.0) -> None:
    """Ends several children at the same time: `timeout_s` is the limit for all together."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.terminate()
    for child in children:
        child.reap(deadline - time.monotonic())


def read_config(config_type: type[T]) -> T:
    """Returns the configuration of a child, as its first call. Ends this process when the parent
    has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    install_stack_dumps()
    parent_pid = int(sys.stdin.buffer.readline() or 0)
    die_with_parent(parent_pid)
    return msgspec.json.decode(sys.stdin.buffer.read(), type=config_type)


def ipc_address(engine_id: str, purpose: str) -> str:
    """Returns a ZeroMQ address within this host: Linux abstract sockets leave no file behind."""
    return f"ipc://@tandem-{engine_id}-{purpose}"
