"""Keeps conversations: metadata, items, and which response adds to them now.

A response that belongs to a conversation reads its items, and adds its own when it is complete. In
between the conversation is locked by the response's id, for as long as its router renews the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, insert, or_, select, update

from router.store.items import Item, drop_items, items_of, put_items
from router.store.sql.owned_rows import named
from router.store.sql.tables import CONVERSATIONS
from router.store.sql.transaction import Transaction


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


def add_conversation(
    transaction: Transaction, conversation: ConversationRow, items: Sequence[Item]
) -> None:
    """Adds a conversation and its first items."""
    values = {name: getattr(conversation, name) for name in ConversationRow.__slots__}
    num_bytes = len(conversation.metadata)
    row = values | {"num_bytes": num_bytes, "locked_by": "", "locked_until": 0.0}
    transaction.execute(insert(CONVERSATIONS).values(**row))
    transaction.charge(conversation.tenant, num_bytes)
    append_items(transaction, conversation, items, conversation.expires_at)


def find_conversation(
    transaction: Transaction, tenant: str, name: str, now: float
) -> ConversationRow | None:
    """Returns a conversation that has not expired."""
    query = select(*_COLUMNS).where(
        *named(CONVERSATIONS, tenant, name), CONVERSATIONS.c.expires_at > now
    )
    row = (transaction.execute(query)).first()
    return None if row is None else ConversationRow(**row._mapping)


def conversation_items(transaction: Transaction, tenant: str, name: str) -> list[Item]:
    """Returns its items, in order."""
    return (items_of(transaction, tenant, [name]))[name]


def append_items(
    transaction: Transaction,
    conversation: ConversationRow,
    items: Sequence[Item],
    expires_at: float,
) -> bool:
    """Adds items at the end, and has the conversation expire then. Returns False where it was
    deleted meanwhile: nothing is added then."""
    where = named(CONVERSATIONS, conversation.tenant, conversation.id)
    # The row is written first: other writers of items wait for this transaction.
    used = update(CONVERSATIONS).where(*where).values(expires_at=expires_at)
    if not (transaction.execute(used)).rowcount:
        return False
    num_bytes = put_items(transaction, conversation.tenant, conversation.id, items)
    _add_bytes(transaction, conversation, num_bytes)
    return True


def drop_item(transaction: Transaction, conversation: ConversationRow, item: Item) -> bool:
    """Removes one item. Returns whether it was there."""
    names = [conversation.id]
    num_dropped = drop_items(transaction, conversation.tenant, names, item.id)
    _add_bytes(transaction, conversation, -len(item.data) * num_dropped)
    return bool(num_dropped)


def set_metadata(transaction: Transaction, conversation: ConversationRow, metadata: bytes) -> None:
    where = named(CONVERSATIONS, conversation.tenant, conversation.id)
    transaction.execute(update(CONVERSATIONS).where(*where).values(metadata=metadata))
    _add_bytes(transaction, conversation, len(metadata) - len(conversation.metadata))


def drop_conversation(transaction: Transaction, tenant: str, name: str) -> bool:
    """Removes a conversation and its items. Returns whether it was there."""
    where = named(CONVERSATIONS, tenant, name)
    query = select(CONVERSATIONS.c.num_bytes).where(*where).with_for_update()
    num_bytes = (transaction.execute(query)).scalar()
    if num_bytes is None:
        return False
    drop_items(transaction, tenant, [name])
    transaction.execute(delete(CONVERSATIONS).where(*where))
    transaction.charge(tenant, -num_bytes)
    return True


def lock(
    transaction: Transaction, tenant: str, name: str, response: str, now: float, until: float
) -> bool:
    """Locks a conversation for a response. Returns whether it could be had."""
    locked_by = CONVERSATIONS.c.locked_by
    free = or_(locked_by.in_(("", response)), CONVERSATIONS.c.locked_until < now)
    values = {"locked_by": response, "locked_until": until}
    where = [*named(CONVERSATIONS, tenant, name), free]
    return bool(
        (transaction.execute(update(CONVERSATIONS).where(*where).values(**values))).rowcount
    )


def renew_locks(transaction: Transaction, responses: Sequence[str], until: float) -> None:
    """Renews what these responses have locked."""
    where = CONVERSATIONS.c.locked_by.in_(responses)
    transaction.execute(update(CONVERSATIONS).where(where).values(locked_until=until))


def unlock(transaction: Transaction, tenant: str, name: str, response: str) -> None:
    """Releases a conversation, if this response holds it."""
    where = [*named(CONVERSATIONS, tenant, name), CONVERSATIONS.c.locked_by == response]
    values = {"locked_by": "", "locked_until": 0.0}
    transaction.execute(update(CONVERSATIONS).where(*where).values(**values))


def expired_conversations(
    transaction: Transaction, now: float, limit: int
) -> list[tuple[str, str]]:
    """Returns tenant and id of conversations that have expired."""
    columns = CONVERSATIONS.c.tenant, CONVERSATIONS.c.id
    query = select(*columns).where(CONVERSATIONS.c.expires_at <= now)
    rows = transaction.execute(query.order_by(CONVERSATIONS.c.tenant).limit(limit))
    return [(row.tenant, row.id) for row in rows]


def _add_bytes(transaction: Transaction, conversation: ConversationRow, num_bytes: int) -> None:
    if num_bytes:
        counted = CONVERSATIONS.c.num_bytes + num_bytes
        where = named(CONVERSATIONS, conversation.tenant, conversation.id)
        transaction.execute(update(CONVERSATIONS).where(*where).values(num_bytes=counted))
        transaction.charge(conversation.tenant, num_bytes)
