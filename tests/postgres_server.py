"""Runs a PostgreSQL server for a test, where the machine has one (Debian's `postgresql`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.local_cluster.cluster import free_ports

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
_START_TIMEOUT_S = 60.0


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([*map(str, _BINARIES), os.environ["PATH"]]))


def has_postgres() -> bool:
    return _program("initdb") is not None


needs_postgres = pytest.mark.skipif(not has_postgres(), reason="PostgreSQL is not installed")


@dataclass(slots=True)
class PostgresServer:
    """Is one server; `url` leads to an empty database. It can be stopped and started again."""

    folder: Path
    port: int
    _process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"postgresql://tandem@127.0.0.1:{self.port}/postgres"

    async def start(self) -> None:
        """Returns when it takes connections."""
        self._process = await _run(
            "postgres", "-D", str(self.folder), "-p", str(self.port), "-k", str(self.folder),
            "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off",
        )  # fmt: skip
        async with asyncio.timeout(_START_TIMEOUT_S):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    if "ready" in (self.folder / "postmaster.pid").read_text():
                        return
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends it at once; connections are cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            await self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def run_postgres() -> AsyncIterator[PostgresServer]:
    # It refuses to run as root, and its user may not look into root's folders.
    folder = Path(tempfile.mkdtemp(prefix="tandem-postgres-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres")
        initdb = await _run(
            "initdb", "-D", str(folder), "-U", "tandem", "-A", "trust", "--no-sync", "-E", "UTF8"
        )
        assert await initdb.wait() == 0
        server = PostgresServer(folder, free_ports(1)[0])
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
    finally:
        shutil.rmtree(folder)


async def _run(name: str, *args: str) -> asyncio.subprocess.Process:
    program = _program(name)
    assert program is not None
    return await asyncio.create_subprocess_exec(
        program,
        *args,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
        user="postgres" if os.geteuid() == 0 else None,
    )
