"""The database of the router's store: one SQLite file, or PostgreSQL shared by several routers.

1. named      by a URL; nothing is connected, and a database that is away stops no router
2. ready      the first use makes the tables, or finds them, and looks at their version
3. used       each `read` or `write` is one transaction, and ends within `timeout_s`
4. closed     connections are given back

A transaction is a plain function of a `Transaction`, so that all of its statements can run in one
go beside the event loop: SQLite's in a thread (`sqlite_threads`), PostgreSQL's over a connection
that the loop reads (`postgres_pool`). Whatever the database does wrong is `StoreUnavailable`, and
the next use tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import insert, select, text
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from router.errors import ConfigurationError
from router.store.errors import StoreUnavailable
from router.store.sql.disk_room import check_room
from router.store.sql.postgres_pool import PostgresPool
from router.store.sql.shared_clock import SharedClock
from router.store.sql.sqlite_threads import SqliteThreads
from router.store.sql.tables import METADATA, SCHEMA, SCHEMA_VERSION
from router.store.sql.transaction import Transaction

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = 7_226_483_301
"""A lock of PostgreSQL: two routers that start at once do not both make the tables."""

Observe = Callable[[str, float, bool], None]
"""Is called with a transaction that has ended: its kind, seconds, and whether it failed."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Purpose:
    """Says what a database is for: the flag that names it, what it keeps, the code of the error
    where it is away, and what a client may do then besides trying again."""

    flag: str = "--response-store"
    kept: str = "responses"
    code: str = "response_store_unavailable"
    advice: str = '; requests with "store": false need none'


RESPONSES_KEPT = Purpose()


class Connections(Protocol):
    """Runs transactions on connections of its own."""

    async def run(self, work: Callable[[Connection], ResultT], *, is_read: bool) -> ResultT:
        """Runs `work` in a transaction, which is kept whole or not at all. One whose caller is
        cancelled is not kept."""

    async def forget_deleted(self) -> None:
        """Overwrites what was deleted, as far as that is not the database's own work."""

    async def close(self) -> None:
        """Gives back all connections."""


class Database:
    """Runs transactions. `url` begins with sqlite:/// or postgresql://."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        observe: Observe,
        purpose: Purpose = RESPONSES_KEPT,
    ) -> None:
        """Raises `ConfigurationError` for a URL that names neither."""
        self._url = _checked_url(url, purpose.flag)
        is_sqlite = self._url.get_backend_name() == "sqlite"
        self._file = Path(str(self._url.database)) if is_sqlite else None
        self._purpose = purpose
        self._timeout_s = timeout_s
        self._observe = observe
        self.clock = SharedClock(is_shared=not is_sqlite)
        """Gives the time by which leases are judged."""
        self._connections: Connections | None = None
        self._is_ready = False
        self._making_ready = asyncio.Lock()

    async def read(self, work: Callable[[Transaction], ResultT]) -> ResultT:
        """Returns what `work` returns, which changes nothing. Raises what it raises, and
        `StoreUnavailable`."""
        return await self._run(lambda c: work(Transaction(c)), is_read=True)

    async def write(self, work: Callable[[Transaction], ResultT]) -> ResultT:
        """Does the same with work that changes something: all of it is kept, or nothing, as where
        `work` raises."""

        def charged(connection: Connection) -> ResultT:
            transaction = Transaction(connection)
            found = work(transaction)
            if transaction.adds and self._file is not None:
                check_room(connection, self._file)
            transaction.write_charges()
            return found

        return await self._run(charged, is_read=False)

    async def forget_deleted(self) -> None:
        """Has the database's files no longer hold what was deleted. Raises `StoreUnavailable`."""
        async with self._asking("write"):
            await (await self._ready_connections()).forget_deleted()

    async def close(self) -> None:
        """Gives back all connections."""
        if self._connections is not None:
            await self._connections.close()

    async def _run(self, work: Callable[[Connection], ResultT], *, is_read: bool) -> ResultT:
        async with self._asking("read" if is_read else "write"):
            connections = await self._ready_connections()
            if self.clock.is_due:
                await connections.run(self.clock.look, is_read=True)
            return await connections.run(work, is_read=is_read)

    @contextlib.asynccontextmanager
    async def _asking(self, kind: str) -> AsyncIterator[None]:
        """Bounds the time of what it is around, and names what goes wrong."""
        began_at, has_failed = time.monotonic(), False
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (SQLAlchemyError, sqlite3.Error, OSError, TimeoutError) as error:
            has_failed = True
            told = self._purpose
            where = self._file or f"{self._url.host or 'its host'}/{self._url.database}"
            logger.error("the store of %s at %s failed: %s", told.kept, where, _shown(error))
            raise StoreUnavailable(
                f"The store of {told.kept} does not answer now. Try again shortly{told.advice}.",
                code=told.code,
            ) from None
        finally:
            self._observe(kind, time.monotonic() - began_at, has_failed)

    async def _ready_connections(self) -> Connections:
        if self._connections is not None and self._is_ready:
            return self._connections
        async with self._making_ready:
            if self._connections is None:
                self._connections = self._connect()
            if not self._is_ready:
                await self._connections.run(_make_tables, is_read=False)
                self._is_ready = True
        return self._connections

    def _connect(self) -> Connections:
        if self._file is not None:
            return SqliteThreads(self._url, self._timeout_s)
        return PostgresPool(self._url, self._timeout_s)


def _make_tables(connection: Connection) -> None:
    """Makes the tables where there are none. Raises `OSError` for those of another version."""
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_ONE_AT_A_TIME})"))
    METADATA.create_all(connection)
    version = connection.execute(select(SCHEMA.c.version)).scalar()
    if version is None:
        connection.execute(insert(SCHEMA).values(version=SCHEMA_VERSION))
    elif version != SCHEMA_VERSION:
        raise OSError(f"it has tables of version {version}, not {SCHEMA_VERSION}")


def _check_file(file: Path, flag: str) -> None:
    """Raises `ConfigurationError` where SQLite could not keep a file and its log beside it."""
    folder = file.parent
    if not folder.is_dir():
        raise ConfigurationError(f"{flag}: there is no folder for the file {file}")
    if file.exists() and not file.is_file():
        raise ConfigurationError(
            f"{flag}: {file} is no file; name a file in a folder that is there"
        )
    place = file if file.exists() else folder
    if not (os.access(folder, os.W_OK | os.X_OK) and os.access(place, os.W_OK)):
        raise ConfigurationError(
            f"{flag}: {place} may not be written; give it and its folder to this process's user "
            f"({os.getuid()}), as fsGroup does for most volumes, or name another"
        )


def _checked_url(text_: str, flag: str) -> URL:
    try:
        url = make_url(text_)
    except ArgumentError:
        url = None
    backend = url.get_backend_name() if url is not None else ""
    if url is not None and backend == "sqlite" and url.database:
        _check_file(Path(url.database), flag)
        return url.set(drivername="sqlite")
    if url is None or backend not in ("postgresql", "postgres") or not url.database:
        raise ConfigurationError(
            f"{flag} must be sqlite:///FILE (an absolute path has four slashes) or "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    # The field writes sslmode; asyncpg's name for it is ssl.
    query = {"ssl" if k == "sslmode" else k: v for k, v in url.query.items()}
    return url.set(drivername="postgresql+asyncpg", query=query)


def _shown(error: BaseException) -> str:
    """Returns what the log may say: never the values of a statement, which drivers name too."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    cause = getattr(error, "orig", None) or error
    is_about_files = isinstance(cause, OSError | sqlite3.OperationalError)
    codes = (getattr(cause, name, "") or "" for name in ("sqlstate", "sqlite_errorname"))
    told = str(cause) if is_about_files else "".join(map(str, codes))
    return f"{type(cause).__name__} {told}".strip()
