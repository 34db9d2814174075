"""Removes what has expired, a few rows at a time, with all that belongs to it."""

from __future__ import annotations

from router.responses.kept_responses import KeptResponses
from router.store import conversations, responses
from router.store.errors import StoreUnavailable
from router.store.sql.transaction import Transaction

_BATCH = 100


async def sweep_responses(kept: KeptResponses) -> int:
    """Removes some responses and conversations. Returns how many there were. On a disk that is
    almost full one of each at a time: a log of the removal of all of them may not fit."""
    try:
        return await _sweep(kept, _BATCH)
    except StoreUnavailable:
        return await _sweep(kept, 1)


async def _sweep(kept: KeptResponses, most: int) -> int:
    database = kept.database

    def look(transaction: Transaction) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        now = kept.clock()
        old = responses.expired(transaction, now, most)
        return old, conversations.expired_conversations(transaction, now, most)

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
