"""Owns the batches that this router works on, by leases in the store.

1. taken      a batch without an owner, or of a router that renews no more; the oldest first
2. renewed    every third of a lease, all at once
3. looked at  each second: one that was cancelled ends, one that has another owner is given up, one
              whose work failed is free again
4. closed     runs are cut off: what they have not kept, the next owner asks again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from router.batches.batch_store import BatchStore
from router.batches.runs.answer import Answering
from router.batches.runs.batch_run import BatchRun
from router.batches.runs.idle_room import IdleRoom
from router.models.known_models import ModelTable
from router.observe.batch_metrics import BatchFacts
from router.request.tenants import Tenant
from router.store.batches import BatchRow, abandoned, claim, owned_by, renew, yield_batch
from router.store.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_LOOK_S = 1.0

_Key = tuple[str, str, int]
"""Tenant, id and attempt of a batch."""


@dataclass(slots=True, kw_only=True)
class BatchRuns:
    """Starts runs and watches over them. `tenants` gives those that exist."""

    store: BatchStore
    answering: Answering
    room: IdleRoom
    tenants: Callable[[], Mapping[str, Tenant]]
    table: Callable[[], ModelTable]
    rng: random.Random = field(default_factory=random.Random)
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    runs: dict[_Key, BatchRun] = field(default_factory=dict)
    _tasks: dict[_Key, asyncio.Task[None]] = field(default_factory=dict)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _known: Mapping[str, Tenant] = field(default_factory=dict)

    def wake(self) -> None:
        """Has it look soon: a batch was made, or cancelled."""
        self._has_news.set()

    async def watch(self) -> None:
        """Watches leases until cancelled."""
        renewed_at = 0.0
        lease_s = self.store.limits.lease_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S * self.rng.uniform(0.9, 1.1)):
                    await self._has_news.wait()
            self._has_news.clear()
            self._known = self.tenants()
            with contextlib.suppress(StoreUnavailable):
                await self._look_at_owned()
                now = self.store.clock()
                if not 0 <= now - renewed_at < lease_s / 3:
                    renewal = partial(renew, owner=self.owner, until=now + lease_s)
                    await self.store.database.write(renewal)
                    renewed_at = now
                await self._take()

    def facts(self) -> list[BatchFacts]:
        """Returns what operators see of the batches here, the oldest first."""
        rows = sorted(self.runs.values(), key=lambda run: run.row.created_at)
        return [run.facts() for run in rows]

    async def close(self) -> None:
        """Cuts runs off, and leaves their batches to other routers."""
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(StoreUnavailable):
            await self.store.database.write(lambda one: renew(one, self.owner, 0.0))

    async def _look_at_owned(self) -> None:
        owned = await self.store.database.read(lambda one: owned_by(one, self.owner))
        for key, run in list(self.runs.items()):
            if key not in owned:
                # One that has just ended is in the store already.
                if not run.row.is_finished:
                    self._tasks[key].cancel()
            elif owned[key] == "cancelling":
                run.stop()
        until = self.store.clock() + self.store.limits.lease_s
        for key in owned.keys() - self.runs.keys():
            await self.store.database.write(partial(yield_batch, key=key, until=until))

    async def _take(self) -> None:
        room = self.store.limits.max_batches - len(self.runs)
        if room <= 0:
            return
        database, clock = self.store.database, self.store.clock
        found = await database.read(lambda one: abandoned(one, clock(), room))
        for row in found:
            until = clock() + self.store.limits.lease_s
            taken = await database.write(
                partial(claim, batch=row, owner=self.owner, lease_until=until, now=0.0)
            )
            if taken is not None:
                self._begin(taken)

    def _begin(self, row: BatchRow) -> None:
        key = (row.tenant, row.id, row.attempt)
        run = BatchRun(
            store=self.store,
            answering=self.answering,
            room=self.room,
            row=row,
            tenant=lambda: self._known.get(row.tenant),
            table=self.table,
            totals=self.answering.totals,
        )
        if row.attempt > 1:
            logger.warning("batch %s: taken over in attempt %d", row.id, row.attempt)
        self.runs[key] = run
        task = self._tasks[key] = asyncio.create_task(run.run())

        def ended(_: asyncio.Task[None]) -> None:
            del self.runs[key], self._tasks[key]

        task.add_done_callback(ended)
