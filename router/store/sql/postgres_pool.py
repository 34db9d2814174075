"""Runs transactions of PostgreSQL on the event loop, over connections that stay open (asyncpg)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.engine import URL, Connection
from sqlalchemy.ext.asyncio import create_async_engine

ResultT = TypeVar("ResultT")

_POOL_SIZE = 10
"""Connections that stay open; under load there are twice as many."""


class PostgresPool:
    """Is a pool that survives a restart of the database."""

    def __init__(self, url: URL, timeout_s: float) -> None:
        self._engine = create_async_engine(
            url,
            pool_pre_ping=True,
            pool_size=_POOL_SIZE,
            max_overflow=_POOL_SIZE,
            connect_args={"timeout": timeout_s, "command_timeout": timeout_s},
            hide_parameters=True,
        )

    async def run(self, work: Callable[[Connection], ResultT], *, is_read: bool) -> ResultT:
        """Runs `work` in a transaction. Each of its statements lets the event loop go on."""
        async with self._engine.connect() as connection, connection.begin():
            return await connection.run_sync(work)

    async def forget_deleted(self) -> None:
        """Does nothing: PostgreSQL cleans up after itself."""

    async def close(self) -> None:
        await self._engine.dispose()
