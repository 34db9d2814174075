"""Removes files and batches that have expired, and files that were deleted, a few parts at a time:
one transaction that removes a large file would hold up all others."""

from __future__ import annotations

from functools import partial

from router.batches.batch_store import BatchStore
from router.store.batches import drop_expired
from router.store.files import drop_some, expired_files

_FILES, _PARTS = 100, 32


async def sweep_batches(store: BatchStore) -> int:
    """Removes all such batches and some files. Returns how many there were."""
    database, clock = store.database, store.clock
    num_batches = await database.write(lambda one: drop_expired(one, clock()))
    found = await database.read(lambda one: expired_files(one, clock(), _FILES))
    for tenant, name in found:
        drop = partial(drop_some, tenant=tenant, name=name, max_parts=_PARTS)
        while not await database.write(drop):
            pass
    return num_batches + len(found)
