"""Work that goes on while what a store keeps is served.

1. served     each of the works has a task
2. drained    `drain` waits for what is at work here; the works, which renew leases, go on
3. cancelled  the works end, so nothing new begins
4. closed     `close` cuts off what is left, and then the database ends
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported by every router, and the database is an extra
    from router.store.sql.database import Database


async def no_drain() -> None:
    """Waits for nothing."""


@asynccontextmanager
async def running_tasks(
    database: Database,
    *works: Coroutine[Any, Any, None],
    close: Callable[[], Awaitable[None]],
    drain: Callable[[], Awaitable[None]] = no_drain,
) -> AsyncIterator[None]:
    """Runs `works`, each in a task of its own, and ends all in the order above."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        try:
            yield
            await drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await close()
    finally:
        await database.close()
