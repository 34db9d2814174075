"""Runs Mooncake Store's master and a process that lends it memory, which outlive nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli.local_cluster.cluster import free_ports

_FOLDER = Path(__file__).parents[2] / ".venv-mooncake"
"""Is where `make mooncake` unpacks it."""
_TIMEOUT_S = 60.0


def _package() -> Path | None:
    if (_FOLDER / ".installed").exists():
        return _FOLDER / "mooncake"
    found = find_spec("mooncake")
    return Path(found.origin).parent if found is not None and found.origin else None


needs_mooncake = pytest.mark.skipif(
    _package() is None, reason="Mooncake is not installed: make mooncake"
)


def python_path() -> str:
    """Returns what PYTHONPATH must have for children to import it."""
    package = _package()
    assert package is not None
    return os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])


@dataclass
class Mooncake:
    """A master, and one process with 64 MiB for blocks."""

    log: Path
    master_port: int = field(default_factory=lambda: free_ports(1)[0])
    master: subprocess.Popen[bytes] | None = None
    keeper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.master_port}"

    def start_master(self) -> None:
        port = self.master_port
        self.master = self._start(
            "mooncake_master", f"--rpc_port={port}", "--rpc_address=127.0.0.1",
            f"--metrics_port={free_ports(1)[0]}",
        )  # fmt: skip
        _until_open(port)

    def start_keeper(self) -> None:
        port = free_ports(1)[0]
        self.keeper = self._start(
            "mooncake_client", f"--master_server_address=127.0.0.1:{self.master_port}",
            "--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
            "--global_segment_size=64MB", f"--port={port}",
        )  # fmt: skip
        _until_open(port)

    def run(self, script: str) -> str:
        """Returns what a client prints that runs `script` with `store`, which is connected."""
        head = (
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            "assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', "
            f"'127.0.0.1:{self.master_port}') == 0\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", head + script + "\nstore.close()"],
            env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def kill(self) -> None:
        for process in (self.keeper, self.master):
            if process is not None:
                process.kill()
                process.wait()
        self.keeper = self.master = None

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        package = _package()
        assert package is not None
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [package / program, *arguments, "--logtostderr"], stdout=log, stderr=log
            )


@contextmanager
def mooncake(folder: Path) -> Iterator[Mooncake]:
    store = Mooncake(folder / "mooncake.log")
    try:
        store.start_master()
        store.start_keeper()
        yield store
    finally:
        store.kill()


def _until_open(port: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
