"""Removes files and batches that have expired, and files that were deleted, a few parts at a time:
one transaction that removes a large file would hold up all others."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from functools import partial

from router.batches.batch_store import BatchStore
from router.store.batches import drop_expired
from router.store.errors import StoreUnavailable
from router.store.files import drop_some, expired_files

_LOOK_S = 60.0
_FILES, _PARTS = 100, 32


@dataclass(frozen=True, slots=True)
class BatchExpiry:
    """Sweeps every minute or so. Several routers may."""

    store: BatchStore
    rng: random.Random = field(default_factory=random.Random)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                if await self.sweep():
                    await self.store.database.forget_deleted()
            await asyncio.sleep(_LOOK_S * self.rng.uniform(0.5, 1.5))

    async def sweep(self) -> int:
        """Removes what there is. Returns how many files and batches it was."""
        database, now = self.store.database, self.store.clock()
        num_dropped = await database.write(lambda one: drop_expired(one, now))
        while found := await database.read(lambda one: expired_files(one, now, _FILES)):
            for tenant, name in found:
                drop = partial(drop_some, tenant=tenant, name=name, max_parts=_PARTS)
                while not await database.write(drop):
                    pass
                num_dropped += 1
        return num_dropped
