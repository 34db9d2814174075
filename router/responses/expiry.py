"""Removes what has expired, a few rows at a time, with all that belongs to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from router.responses.kept_responses import KeptResponses
from router.store import conversations, responses
from router.store.errors import StoreUnavailable

_LOOK_S = 60.0
_BATCH = 100


@dataclass(frozen=True, slots=True)
class Expiry:
    """Sweeps every minute or so. Several routers may."""

    kept: KeptResponses
    rng: random.Random = field(default_factory=random.Random)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                while await self.sweep():
                    pass
                await self.kept.database.forget_deleted()
            await asyncio.sleep(_LOOK_S * self.rng.uniform(0.5, 1.5))

    async def sweep(self) -> int:
        """Removes a batch. Returns how many there were."""
        database, now = self.kept.database, self.kept.clock()
        async with database.reading() as transaction:
            old = await responses.expired(transaction, now, _BATCH)
            left = await conversations.expired_conversations(transaction, now, _BATCH)
        if not old and not left:
            return 0
        async with database.writing() as transaction:
            for tenant, name in old:
                await responses.drop_response(transaction, tenant, name)
            for tenant, name in left:
                await conversations.drop_conversation(transaction, tenant, name)
        return len(old) + len(left)
