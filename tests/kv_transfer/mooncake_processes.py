"""Runs Mooncake Store's master, and processes that lend it memory, which outlive nodes, for tests
and benches; and scripts against them.

They are found where `import mooncake` finds the package: in PYTHONPATH, if it is unpacked and not
installed (`make mooncake`).
"""

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
from host.termination import bound

UNPACKED = Path(__file__).parents[2] / ".venv-mooncake"
"""Is where `make mooncake` unpacks it."""
_TIMEOUT_S = 60.0


def package() -> Path | None:
    """Returns the package's folder; None: it is not here."""
    if (UNPACKED / ".installed").exists():
        return UNPACKED / "mooncake"
    found = find_spec("mooncake")
    return Path(found.origin).parent if found is not None and found.origin else None


def python_path() -> str:
    """Returns what PYTHONPATH must have for children to import it. Raises `FileNotFoundError`."""
    folder = package()
    if folder is None:
        raise FileNotFoundError("Mooncake is not here: make mooncake, or install tandem[store]")
    return os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])


@dataclass
class Mooncake:
    """A master, and `num_keepers` processes with `memory_mib` for blocks each. `log` gets what all
    write."""

    log: Path
    memory_mib: int = 64
    num_keepers: int = 1
    master_port: int = field(default_factory=lambda: free_ports(1)[0])
    master: subprocess.Popen[bytes] | None = None
    keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)

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

    def start_keepers(self) -> None:
        for port in free_ports(self.num_keepers):
            keeper = self._start(
                "mooncake_client", f"--master_server_address=127.0.0.1:{self.master_port}",
                "--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
                f"--global_segment_size={self.memory_mib}MB", f"--port={port}",
            )  # fmt: skip
            self.keepers.append(keeper)
            _until_open(port)

    def kill(self) -> None:
        for process in (*self.keepers, self.master):
            if process is not None:
                process.kill()
                process.wait()
        self.keepers, self.master = [], None

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        folder = package()
        assert folder is not None
        with self.log.open("ab") as log:
            return subprocess.Popen(
                bound([str(folder / program), *arguments, "--logtostderr"]),
                stdout=log,
                stderr=log,
            )


@contextmanager
def mooncake(folder: Path, memory_mib: int = 64, num_keepers: int = 1) -> Iterator[Mooncake]:
    """Starts all; kills them at the end."""
    store = Mooncake(folder / "mooncake.log", memory_mib, num_keepers)
    try:
        store.start_master()
        store.start_keepers()
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
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


needs_mooncake = pytest.mark.skipif(
    package() is None, reason="Mooncake is not installed: make mooncake"
)


def run_client(store: Mooncake, script: str) -> str:
    """Returns what a client prints that runs `script` with `store`, which is connected."""
    head = (
        "from mooncake.store import MooncakeDistributedStore\n"
        "store = MooncakeDistributedStore()\n"
        "assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', "
        f"'127.0.0.1:{store.master_port}') == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + script + "\nstore.close()"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
