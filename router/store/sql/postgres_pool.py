"""Runs transactions of PostgreSQL on the event loop, over connections that stay open (asyncpg)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import create_async_engine

ResultT = TypeVar("ResultT")

_POOL_SIZE = 10
"""Connections that stay open; under load there are twice as many."""


_CHECK_PART = 0.25
"""The part of a transaction's time within which a connection that was idle must answer."""


class PostgresPool:
    """Is a pool that survives a restart of the database, and networks that forget connections which
    are quiet: they tell neither end, so each one is asked before it is used."""

    def __init__(self, url: URL, timeout_s: float) -> None:
        self._engine = create_async_engine(
            url,
            pool_size=_POOL_SIZE,
            max_overflow=_POOL_SIZE,
            connect_args={"timeout": timeout_s, "command_timeout": timeout_s},
            hide_parameters=True,
        )
        self._check_s = timeout_s * _CHECK_PART
        event.listen(self._engine.sync_engine, "checkout", self._check)

    def _check(self, connection: Any, record: object, proxy: object) -> None:
        """Has the pool make another connection in place of one that does not answer. Raises
        `DisconnectionError`."""
        try:
            connection.run_async(lambda driver: driver.execute("SELECT 1", timeout=self._check_s))
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            # Else the pool would wait until it is closed in order.
            connection.driver_connection.terminate()
            raise DisconnectionError from None

    async def run(self, work: Callable[[Connection], ResultT], *, is_read: bool) -> ResultT:
        """Runs `work` in a transaction. Each of its statements lets the event loop go on."""
        async with self._engine.connect() as connection, connection.begin():
            return await connection.run_sync(work)

    async def forget_deleted(self) -> None:
        """Does nothing: PostgreSQL cleans up after itself."""

    async def close(self) -> None:
        await self._engine.dispose()
