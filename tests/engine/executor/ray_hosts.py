"""A Ray cluster of two hosts on loopback addresses, for tests. Each has room for one CPU worker.

`ray start` is what an operator runs, too. The cluster takes a token, since Ray's own servers
listen on every interface. Everything of it ends with its `ray start --block`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cli.cluster import free_ports
from tests.processes import descendants, find_processes, is_alive

ROOT = Path(__file__).resolve().parents[3]
LEADER, OTHER = "127.0.0.2", "127.0.0.3"
_FLAGS = (
    "--num-cpus=1", "--num-gpus=0", "--object-store-memory=78643200", "--block",
    # Any ports: the usual range is the one from which other tests take theirs.
    "--min-worker-port=0", "--max-worker-port=0",
)  # fmt: skip
_ADDRESS = re.compile(r"--address='([^']+)'")
_STOP_TIMEOUT_S = 20


class RayNode:
    """One `ray start`."""

    def __init__(self, env: dict[str, str], address: str, *flags: str) -> None:
        self.address = address
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
        """Waits for the first line of its log that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if match := pattern.search(line):
                return match
        raise AssertionError(f"ray start ended: {''.join(self.log)}")

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
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        assert self.process.stdout is not None
        self.process.stdout.close()


class RayHosts:
    """`address` of the cluster's head, `env` of everybody who uses it."""

    def __init__(self, folder: Path) -> None:
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "proto", "kernels")),
        }
        self._env = {**os.environ, **self.env}
        self.nodes = [
            RayNode(
                self._env,
                LEADER,
                "--head",
                "--port=0",
                f"--node-ip-address={LEADER}",
                "--include-dashboard=false",
                f"--ray-client-server-port={free_ports(1)[0]}",
                f"--temp-dir={folder}",
            )
        ]
        try:
            self.address = self.nodes[0].wait_for(_ADDRESS).group(1)
            self.join()
        except BaseException:
            self.stop()
            raise

    def join(self) -> None:
        """Lets another host join, in a few seconds."""
        self.nodes.append(
            RayNode(self._env, OTHER, f"--address={self.address}", f"--node-ip-address={OTHER}")
        )

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()


@contextlib.contextmanager
def ray_hosts() -> Iterator[RayHosts]:
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    try:
        hosts = RayHosts(folder)
        try:
            yield hosts
        finally:
            hosts.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
