"""Removes what has expired, a few rows at a time, with all that belongs to it."""

from __future__ import annotations

from router.responses.kept_responses import KeptResponses
from router.store import conversations, responses
from router.store.sql.transaction import Transaction

_BATCH = 100


async def sweep_responses(kept: KeptResponses) -> int:
    """Removes some responses and conversations. Returns how many there were."""
    database = kept.database

    def look(transaction: Transaction) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        now = kept.clock()
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
