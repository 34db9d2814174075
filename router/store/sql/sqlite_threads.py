"""Runs transactions of SQLite in threads: one that writes, since SQLite has one writer at a time,
and a few that read beside it.

A transaction goes to its thread and back once, however many statements it has: a thread that has to
come to the event loop for each of them waits for its turn each time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Connection

ResultT = TypeVar("ResultT")

_READS = "tandem_reads"
_NUM_READERS = 4
_OWNER_ONLY = 0o600


class _GivenUp(Exception):
    """Nothing waits for the transaction any more."""


class SqliteThreads:
    """Writes in the order of the calls, which wait in the writer's queue."""

    def __init__(self, url: URL, timeout_s: float) -> None:
        """Makes the file where there is none. Raises `OSError`."""
        _create_file(Path(str(url.database)))
        arguments = {"timeout": timeout_s, "check_same_thread": False}
        self._engine = create_engine(url, connect_args=arguments, hide_parameters=True)
        event.listen(self._engine, "connect", _set_up)
        event.listen(self._engine, "begin", _begin)
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "store-reader")

    async def run(self, work: Callable[[Connection], ResultT], *, is_read: bool) -> ResultT:
        """Runs `work` in a transaction, which is undone where the caller is cancelled."""
        threads = self._readers if is_read else self._writer
        given_up = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(threads, self._run, work, is_read, given_up)
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def forget_deleted(self) -> None:
        """Writes the log back into the file, so that neither has what was deleted."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._truncate_log)

    async def close(self) -> None:
        for threads in (self._writer, self._readers):
            await asyncio.to_thread(threads.shutdown)
        self._engine.dispose()

    def _run(
        self, work: Callable[[Connection], ResultT], is_read: bool, given_up: threading.Event
    ) -> ResultT:
        with self._engine.connect() as connection:
            if is_read:
                connection.execution_options(**{_READS: True})
            with connection.begin():
                found = work(connection)
                if given_up.is_set():
                    raise _GivenUp
                return found

    def _truncate_log(self) -> None:
        # Outside of a transaction, in which it would have to wait for itself.
        with self._engine.connect() as connection:
            cursor = connection.connection.cursor()
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            cursor.close()


def _create_file(path: Path) -> None:
    """Makes a file that only its owner reads, where there is none. Raises `OSError`."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, _OWNER_ONLY))


def _set_up(connection: Any, _record: object) -> None:
    """Has transactions begin where we say, survive a loss of power, and leave no deleted text."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    # A transaction that reads first and writes later would fail when another one writes between.
    reads = connection.get_execution_options().get(_READS)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
