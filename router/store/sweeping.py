"""Removes from a store what has expired, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from router.store.errors import StoreUnavailable
from router.store.sql.database import Database

_PAUSE_S = 60.0


async def sweep_forever(
    database: Database, sweep: Callable[[], Awaitable[int]], rng: random.Random | None = None
) -> None:
    """Sweeps every minute or so until cancelled; several routers may.

    Args:
        sweep: Removes some of what has expired, and returns how many that were; 0: nothing is left.
    """
    chance = rng or random.Random()
    while True:
        with contextlib.suppress(StoreUnavailable):
            while await sweep():
                pass
            await database.forget_deleted()
        await asyncio.sleep(_PAUSE_S * chance.uniform(0.5, 1.5))
