"""A Ray cluster of two hosts, for tests. Each has room for one CPU worker.

    leader 198.18.X.1 ── switch ── 198.18.X.2 other      network namespaces, where they can be had
    leader  127.0.0.2 ───────────── 127.0.0.3 other      else addresses of one host

`ray start` is what an operator runs, too. The cluster takes a token, since Ray's own servers
listen on every interface. Everything of it ends with its `ray start --block`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from cli.local_cluster.cluster import free_ports
from tests.network_namespaces import NoNamespacesError, Switch, opened_switch
from tests.processes import descendants, find_processes, is_alive
from tests.quick_imports import hidden_by

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("leader", "other")
_FLAGS = (
    "--num-cpus=1", "--num-gpus=0", "--object-store-memory=78643200", "--block",
    # Any ports: the usual range is the one from which other tests take theirs.
    "--min-worker-port=0", "--max-worker-port=0",
    # Processes that no test looks at take seconds to start.
    "--include-log-monitor=false",
)  # fmt: skip
_ADDRESS = re.compile(r"--address='([^']+)'")
_JOINED = re.compile("Ray runtime started")
_MORE_STARTS = 3
_STOP_TIMEOUT_S = 20


class RayEndedError(AssertionError):
    """A `ray start` has given up."""


class RayNode:
    """One `ray start`."""

    def __init__(self, env: dict[str, str], *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *_FLAGS, *flags],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Waits for the first line of its log that matches. Raises `RayEndedError`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if match := pattern.search(line):
                return match
        raise RayEndedError(f"ray start ended: {''.join(self.log)}")

    @property
    def raylet(self) -> int:
        (pid,) = find_processes(self.process.pid, r"raylet/raylet ")
        return pid

    def actors(self) -> list[int]:
        """Returns Ray's worker processes that run a rank's actor."""
        return find_processes(self.process.pid, r"ray::RankActor")

    def stop(self) -> None:
        pids = descendants(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in filter(is_alive, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        assert self.process.stdout is not None
        self.process.stdout.close()


class RayHosts:
    """`address` of the cluster's head, `env` of everybody who uses it. `addresses` has those of
    the leader and of the other host, `switch` what is between them; a text says why there is
    none."""

    def __init__(self, folder: Path, switch: Switch | str) -> None:
        self.switch = switch
        self.addresses = ["127.0.0.2", "127.0.0.3"]
        if isinstance(switch, Switch):
            self.addresses = [switch.addresses[name] for name in NAMES]
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        folders = [hidden_by(folder), *(str(ROOT / part) for part in ("", "proto", "kernels"))]
        python = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(folders)}
        self._env = {**os.environ, **self.env, **python}
        self.nodes: list[RayNode] = []
        try:
            started = self._start(
                "--head",
                "--port=0",
                "--include-dashboard=false",
                "--no-monitor",
                f"--ray-client-server-port={free_ports(1)[0]}",
                f"--temp-dir={folder}",
            )
            self.address = started.group(1)
            self._start(f"--address={self.address}")
        except BaseException:
            self.stop()
            raise

    def _start(self, *flags: str) -> re.Match[str]:
        """Starts Ray on the next host. Ray itself gives up where its start takes 30 s, as it may
        where many tests run at once."""
        index = len(self.nodes)
        for is_last in [False] * _MORE_STARTS + [True]:
            with self._on(NAMES[index]):
                node = RayNode(self._env, *flags, f"--node-ip-address={self.addresses[index]}")
            self.nodes.append(node)
            try:
                return node.wait_for(_JOINED if index else _ADDRESS)
            except RayEndedError:
                if is_last:
                    raise
                self.nodes.pop().stop()
        raise AssertionError("unreachable")

    def _on(self, name: str) -> AbstractContextManager[None]:
        return self.switch.on(name) if isinstance(self.switch, Switch) else nullcontext()

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()


@contextmanager
def ray_hosts() -> Iterator[RayHosts]:
    """This thread, and all that it starts, is on the leader's host meanwhile."""
    with ExitStack() as stack:
        switch: Switch | str
        try:
            switch = stack.enter_context(opened_switch(*NAMES))
            stack.enter_context(switch.on(NAMES[0]))
        except NoNamespacesError as error:
            switch = str(error)
        folder = Path(tempfile.mkdtemp(prefix="ray"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = RayHosts(folder, switch)
        stack.callback(hosts.stop)
        yield hosts
