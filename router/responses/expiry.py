"""Removes what has expired, a few rows at a time, with all that belongs to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from router.responses.kept_responses import KeptResponses
from router.store import conversations, responses
from router.store.errors import StoreUnavailable
from router.store.transaction import Transaction

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

        def look(transaction: Transaction) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
            old = responses.expired(transaction, now, _BATCH)
            return old, conversations.expired_conversations(transaction, now, _BATCH)

        old, left = await database.read(look)
        if not old and not left:
            return 0

        def drop(transaction: Transaction) -> None:
            for tenant, name in old:
                responses.drop_response(transaction, tenant, name)
            for tenant, name in left:
                conversations.drop_conversation(transaction, tenant, name)

        await database.write(drop)
        return len(old) + len(left)
