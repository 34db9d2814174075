"""Keeps conversations: metadata, items, and which response adds to them now.

A response that belongs to a conversation reads its items, and adds its own when it is complete. In
between the conversation is locked by the response's id, for as long as its router renews the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, insert, or_, select, update

from router.store.items import Item, drop_items, items_of, put_items
from router.store.tables import CONVERSATIONS
from router.store.transaction import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """Is one row, without its lock. `metadata` is a JSON object."""

    tenant: str
    id: str
    created_at: float
    expires_at: float
    metadata: bytes
    num_bytes: int = 0


_COLUMNS = [CONVERSATIONS.c[name] for name in ConversationRow.__slots__]


async def add_conversation(
    transaction: Transaction, conversation: ConversationRow, items: Sequence[Item]
) -> None:
    """Adds a conversation and its first items."""
    values = {name: getattr(conversation, name) for name in ConversationRow.__slots__}
    num_bytes = len(conversation.metadata)
    row = values | {"num_bytes": num_bytes, "locked_by": "", "locked_until": 0.0}
    await transaction.execute(insert(CONVERSATIONS).values(**row))
    transaction.charge(conversation.tenant, num_bytes)
    await append_items(transaction, conversation, items, conversation.expires_at)


async def find_conversation(
    transaction: Transaction, tenant: str, name: str, now: float
) -> ConversationRow | None:
    """Returns a conversation that has not expired."""
    query = select(*_COLUMNS).where(*_is(tenant, name), CONVERSATIONS.c.expires_at > now)
    row = (await transaction.execute(query)).first()
    return None if row is None else ConversationRow(**row._mapping)


async def conversation_items(transaction: Transaction, tenant: str, name: str) -> list[Item]:
    """Returns its items, in order."""
    return (await items_of(transaction, tenant, [name]))[name]


async def append_items(
    transaction: Transaction,
    conversation: ConversationRow,
    items: Sequence[Item],
    expires_at: float,
) -> bool:
    """Adds items at the end, and has the conversation expire then. Returns False where it was
    deleted meanwhile: nothing is added then."""
    where = _is(conversation.tenant, conversation.id)
    # The row is written first: whoever else adds items waits for this transaction.
    used = update(CONVERSATIONS).where(*where).values(expires_at=expires_at)
    if not (await transaction.execute(used)).rowcount:
        return False
    num_bytes = await put_items(transaction, conversation.tenant, conversation.id, items)
    await _add_bytes(transaction, conversation, num_bytes)
    return True


async def drop_item(transaction: Transaction, conversation: ConversationRow, item: Item) -> bool:
    """Removes one item. Returns whether it was there."""
    names = [conversation.id]
    num_dropped = await drop_items(transaction, conversation.tenant, names, item.id)
    await _add_bytes(transaction, conversation, -len(item.data) * num_dropped)
    return bool(num_dropped)


async def set_metadata(
    transaction: Transaction, conversation: ConversationRow, metadata: bytes
) -> None:
    where = _is(conversation.tenant, conversation.id)
    await transaction.execute(update(CONVERSATIONS).where(*where).values(metadata=metadata))
    await _add_bytes(transaction, conversation, len(metadata) - len(conversation.metadata))


async def drop_conversation(transaction: Transaction, tenant: str, name: str) -> bool:
    """Removes a conversation and its items. Returns whether it was there."""
    where = _is(tenant, name)
    query = select(CONVERSATIONS.c.num_bytes).where(*where).with_for_update()
    num_bytes = (await transaction.execute(query)).scalar()
    if num_bytes is None:
        return False
    await drop_items(transaction, tenant, [name])
    await transaction.execute(delete(CONVERSATIONS).where(*where))
    transaction.charge(tenant, -num_bytes)
    return True


async def lock(
    transaction: Transaction, tenant: str, name: str, response: str, now: float, until: float
) -> bool:
    """Locks a conversation for a response. Returns whether it could be had."""
    locked_by = CONVERSATIONS.c.locked_by
    free = or_(locked_by.in_(("", response)), CONVERSATIONS.c.locked_until < now)
    values = {"locked_by": response, "locked_until": until}
    where = [*_is(tenant, name), free]
    return bool(
        (await transaction.execute(update(CONVERSATIONS).where(*where).values(**values))).rowcount
    )


async def renew_locks(transaction: Transaction, responses: Sequence[str], until: float) -> None:
    """Renews what these responses have locked."""
    where = CONVERSATIONS.c.locked_by.in_(responses)
    await transaction.execute(update(CONVERSATIONS).where(where).values(locked_until=until))


async def unlock(transaction: Transaction, tenant: str, name: str, response: str) -> None:
    """Lets go of a conversation, if this response has it."""
    where = [*_is(tenant, name), CONVERSATIONS.c.locked_by == response]
    values = {"locked_by": "", "locked_until": 0.0}
    await transaction.execute(update(CONVERSATIONS).where(*where).values(**values))


async def expired_conversations(
    transaction: Transaction, now: float, limit: int
) -> list[tuple[str, str]]:
    """Returns tenant and id of conversations that have expired."""
    columns = CONVERSATIONS.c.tenant, CONVERSATIONS.c.id
    query = select(*columns).where(CONVERSATIONS.c.expires_at <= now)
    rows = await transaction.execute(query.order_by(CONVERSATIONS.c.tenant).limit(limit))
    return [(row.tenant, row.id) for row in rows]


async def _add_bytes(
    transaction: Transaction, conversation: ConversationRow, num_bytes: int
) -> None:
    if num_bytes:
        counted = CONVERSATIONS.c.num_bytes + num_bytes
        where = _is(conversation.tenant, conversation.id)
        await transaction.execute(update(CONVERSATIONS).where(*where).values(num_bytes=counted))
        transaction.charge(conversation.tenant, num_bytes)


def _is(tenant: str, name: str) -> list[ColumnElement[bool]]:
    return [CONVERSATIONS.c.tenant == tenant, CONVERSATIONS.c.id == name]
