"""The database of the router's store: one SQLite file, or PostgreSQL shared by several routers.

1. named      by a URL; nothing is connected, and a database that is away stops no router
2. ready      the first use makes the tables, or finds them, and looks at their version
3. used       each `reading` or `writing` is one transaction, and ends within `timeout_s`
4. closed     connections are given back

Whatever the database does wrong is `StoreUnavailable`, and the next use tries again. SQLite runs
in threads of aiosqlite, PostgreSQL is asked by asyncpg: the event loop waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sqlalchemy import event, insert, select, text
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from router.errors import ConfigurationError
from router.store.errors import StoreUnavailable
from router.store.tables import METADATA, SCHEMA, SCHEMA_VERSION
from router.store.transaction import Transaction

logger = logging.getLogger(__name__)

_READS = "tandem_reads"
_ONE_AT_A_TIME = 7_226_483_301
"""A lock of PostgreSQL: two routers that start at once do not both make the tables."""
_OWNER_ONLY = 0o600
_POOL_SIZE = 10
"""Connections to PostgreSQL that stay open; under load there are twice as many."""

Observe = Callable[[str, float, bool], None]
"""Is told of a transaction that has ended: its kind, seconds, and whether it failed."""


class Database:
    """Opens transactions. `url` begins with sqlite:/// or postgresql://."""

    def __init__(self, url: str, timeout_s: float, observe: Observe) -> None:
        """Raises `ConfigurationError` for a URL that names neither."""
        self._url = _checked_url(url)
        self._timeout_s = timeout_s
        self._observe = observe
        self.is_sqlite = self._url.get_backend_name() == "sqlite"
        self._engine: AsyncEngine | None = None
        self._is_ready = False
        self._making_ready = asyncio.Lock()
        self._writer = asyncio.Lock()
        """SQLite has one writer at a time: ours wait here, where the wait is fair."""

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Transaction]:
        """Is a transaction that changes nothing. Raises `StoreUnavailable`."""
        async with self._transaction("read") as transaction:
            yield transaction

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[Transaction]:
        """Is a transaction: all of it is kept when it ends, or nothing. Raises
        `StoreUnavailable`."""
        lock = self._writer if self.is_sqlite else contextlib.nullcontext()
        async with self._transaction("write", lock) as transaction:
            yield transaction
            await transaction.write_charges()

    async def forget_deleted(self) -> None:
        """Has SQLite write its log back into the file, so that neither has what was deleted.
        Raises `StoreUnavailable`."""
        if self.is_sqlite:
            engine = await self._ready_engine()
            async with engine.connect() as connection:
                await connection.run_sync(_truncate_log)

    async def close(self) -> None:
        """Gives back all connections."""
        if self._engine is not None:
            await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def _transaction(
        self, kind: str, lock: contextlib.AbstractAsyncContextManager[Any] | None = None
    ) -> AsyncIterator[Transaction]:
        began_at, has_failed = time.monotonic(), False
        try:
            async with asyncio.timeout(self._timeout_s), lock or contextlib.nullcontext():
                engine = await self._ready_engine()
                async with engine.connect() as connection:
                    if kind == "read":
                        await connection.execution_options(**{_READS: True})
                    async with connection.begin():
                        yield Transaction(connection)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            has_failed = True
            logger.error("the response store failed: %s", _shown(error))
            raise StoreUnavailable(
                "The store of responses does not answer now. Try again shortly, or send "
                '"store": false.'
            ) from None
        finally:
            self._observe(kind, time.monotonic() - began_at, has_failed)

    async def _ready_engine(self) -> AsyncEngine:
        if self._engine is not None and self._is_ready:
            return self._engine
        async with self._making_ready:
            if self._engine is None:
                self._engine = self._make_engine()
            if not self._is_ready:
                async with self._engine.begin() as connection:
                    await self._make_tables(connection)
                self._is_ready = True
        return self._engine

    async def _make_tables(self, connection: AsyncConnection) -> None:
        if not self.is_sqlite:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_ONE_AT_A_TIME})"))
        await connection.run_sync(METADATA.create_all)
        version = (await connection.execute(select(SCHEMA.c.version))).scalar()
        if version is None:
            await connection.execute(insert(SCHEMA).values(version=SCHEMA_VERSION))
        elif version != SCHEMA_VERSION:
            raise OSError(f"it has tables of version {version}, not {SCHEMA_VERSION}")

    def _make_engine(self) -> AsyncEngine:
        if not self.is_sqlite:
            arguments = {"timeout": self._timeout_s, "command_timeout": self._timeout_s}
            return create_async_engine(
                self._url,
                pool_pre_ping=True,
                pool_size=_POOL_SIZE,
                max_overflow=_POOL_SIZE,
                connect_args=arguments,
                hide_parameters=True,
            )
        _create_file(Path(str(self._url.database)))
        arguments = {"timeout": self._timeout_s}
        engine = create_async_engine(self._url, connect_args=arguments, hide_parameters=True)
        event.listen(engine.sync_engine, "connect", _set_up_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine


def _checked_url(text_: str) -> URL:
    try:
        url = make_url(text_)
    except ArgumentError:
        url = None
    backend = url.get_backend_name() if url is not None else ""
    if url is not None and backend == "sqlite" and url.database:
        if not Path(url.database).parent.is_dir():
            raise ConfigurationError(
                f"--response-store: there is no folder for the file {url.database}"
            )
        return url.set(drivername="sqlite+aiosqlite")
    if url is None or backend not in ("postgresql", "postgres") or not url.database:
        raise ConfigurationError(
            "--response-store must be sqlite:///FILE (an absolute path has four slashes) or "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    # The field writes sslmode; asyncpg's name for it is ssl.
    query = {"ssl" if k == "sslmode" else k: v for k, v in url.query.items()}
    return url.set(drivername="postgresql+asyncpg", query=query)


def _create_file(path: Path) -> None:
    """Makes a file that only its owner reads, where there is none. Raises `OSError`."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, _OWNER_ONLY))


def _set_up_sqlite(connection: Any, _record: object) -> None:
    """Has transactions begin where we say, survive a loss of power, and leave no deleted text."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _truncate_log(connection: Connection) -> None:
    # Outside of a transaction, in which it would have to wait for itself.
    cursor = connection.connection.cursor()
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later would fail when another one writes between.
    reads = connection.get_execution_options().get(_READS)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _shown(error: BaseException) -> str:
    """Returns what the log may say: never the values of a statement, which drivers name too."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    cause = getattr(error, "orig", None) or error
    is_about_files = isinstance(cause, OSError | sqlite3.OperationalError)
    told = str(cause) if is_about_files else str(getattr(cause, "sqlstate", "") or "")
    return f"{type(cause).__name__} {told}".strip()
