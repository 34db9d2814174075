"""Keeps responses, each with the items of its own input and output.

A response that answers at once is added when it is complete. One in the background is added before
its work begins, and has an owner until it ends:

    queued ──▶ in_progress ──▶ completed | incomplete | failed | cancelled
      ▲            │
      └── claim ◀──┘   its owner's lease has run out: another router takes it, with a new attempt

Whatever an owner writes counts only while it is the owner still, by name and attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Row, and_, delete, insert, literal, select, update

from router.store.items import Item, drop_items, items_of, put_items
from router.store.sql.owned_rows import named, owned
from router.store.sql.tables import EVENTS, RESPONSES
from router.store.sql.transaction import Transaction

UNFINISHED = ("queued", "in_progress")
_REFRESH = 0.9
"""A chain lives on with its last response, whose use is written down when a tenth of its time
has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRow:
    """Is one row. `body` is the response object without its output, which are items; `request` is
    what is needed to answer again, while the response is not finished."""

    tenant: str
    id: str
    status: str
    body: bytes
    expires_at: float
    previous: str = ""
    conversation: str = ""
    is_background: bool = False
    is_stream: bool = False
    request: bytes = b""
    owner: str = ""
    lease_until: float = 0.0
    attempt: int = 0

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED


_COLUMNS = [RESPONSES.c[name] for name in ResponseRow.__slots__]


def add_response(transaction: Transaction, response: ResponseRow, items: Sequence[Item]) -> None:
    """Adds a response and its items."""
    values = {name: getattr(response, name) for name in ResponseRow.__slots__}
    num_bytes = len(response.body) + len(response.request)
    num_bytes += put_items(transaction, response.tenant, response.id, items, is_new=True)
    transaction.execute(insert(RESPONSES).values(**values, num_bytes=num_bytes))
    transaction.charge(response.tenant, num_bytes)


def find_response(
    transaction: Transaction, tenant: str, name: str, now: float
) -> ResponseRow | None:
    """Returns a response that has not expired."""
    query = select(*_COLUMNS).where(*named(RESPONSES, tenant, name), RESPONSES.c.expires_at > now)
    row = (transaction.execute(query)).first()
    return None if row is None else _response(row)


def chain_of(transaction: Transaction, tenant: str, name: str, now: float) -> list[ResponseRow]:
    """Returns a response and those that it goes on from, the first one first. Where one is missing
    the list begins behind it."""
    base = select(RESPONSES.c.id, RESPONSES.c.previous, literal(0).label("depth")).where(
        *named(RESPONSES, tenant, name)
    )
    chain = base.cte("chain", recursive=True)
    step = select(RESPONSES.c.id, RESPONSES.c.previous, chain.c.depth + 1).where(
        RESPONSES.c.tenant == tenant, RESPONSES.c.id == chain.c.previous
    )
    chain = chain.union_all(step)
    query = (
        select(*_COLUMNS)
        .join(chain, and_(RESPONSES.c.id == chain.c.id, RESPONSES.c.tenant == tenant))
        .where(RESPONSES.c.expires_at > now)
        .order_by(chain.c.depth.desc())
    )
    return [_response(row) for row in transaction.execute(query)]


def chain_items(transaction: Transaction, tenant: str, chain: Sequence[ResponseRow]) -> list[Item]:
    """Returns the items of a chain: what was said, in order."""
    names = [response.id for response in chain]
    found = items_of(transaction, tenant, names)
    return [item for name in names for item in found[name]]


def keep_alive(
    transaction: Transaction, chain: Sequence[ResponseRow], now: float, expires_at: float
) -> None:
    """Has a chain live as long as the response that goes on from it."""
    soon = now + (expires_at - now) * _REFRESH
    old = [response.id for response in chain if response.expires_at < soon]
    if old:
        where = [RESPONSES.c.tenant == chain[0].tenant, RESPONSES.c.id.in_(old)]
        transaction.execute(update(RESPONSES).where(*where).values(expires_at=expires_at))


def drop_response(transaction: Transaction, tenant: str, name: str) -> bool:
    """Removes a response, its items and its events. Returns whether it was there."""
    where = named(RESPONSES, tenant, name)
    query = select(RESPONSES.c.num_bytes).where(*where).with_for_update()
    num_bytes = (transaction.execute(query)).scalar()
    if num_bytes is None:
        return False
    drop_items(transaction, tenant, [name])
    of_response = EVENTS.c.tenant == tenant, EVENTS.c.response == name
    transaction.execute(delete(EVENTS).where(*of_response))
    transaction.execute(delete(RESPONSES).where(*where))
    transaction.charge(tenant, -num_bytes)
    return True


def begin(transaction: Transaction, response: ResponseRow, body: bytes) -> bool:
    """Notes that the answer has begun. Returns whether its owner still is that."""
    values = {"status": "in_progress", "body": body}
    return _write(transaction, response, values, 0)


def finish(
    transaction: Transaction,
    response: ResponseRow,
    status: str,
    body: bytes,
    output: Sequence[Item],
) -> bool:
    """Ends a response of the background. Returns whether its owner still is that."""
    values = {"status": status, "body": body, "request": b"", "owner": "", "lease_until": 0.0}
    num_bytes = len(body) - len(response.body) - len(response.request)
    if not _write(transaction, response, values, num_bytes):
        return False
    num_bytes = put_items(transaction, response.tenant, response.id, output)
    add_bytes(transaction, response.tenant, response.id, num_bytes)
    return True


def claim(
    transaction: Transaction, response: ResponseRow, owner: str, lease_until: float
) -> ResponseRow | None:
    """Makes `owner` the owner of a response whose lease has run out. Returns it as it is then;
    None: another one was faster."""
    values = {"owner": owner, "lease_until": lease_until, "attempt": response.attempt + 1}
    unrenewed = RESPONSES.c.lease_until == response.lease_until
    where = [*owned(RESPONSES, response, UNFINISHED), unrenewed]
    if not (transaction.execute(update(RESPONSES).where(*where).values(**values))).rowcount:
        return None
    return find_response(transaction, response.tenant, response.id, 0.0)


def cancel(transaction: Transaction, response: ResponseRow, body: bytes) -> bool:
    """Ends an unfinished response, whichever router works on it. Returns whether it was
    unfinished."""
    values = {"status": "cancelled", "body": body, "request": b"", "owner": "", "lease_until": 0.0}
    num_bytes = len(body) - len(response.body) - len(response.request)
    where = [*named(RESPONSES, response.tenant, response.id), RESPONSES.c.status.in_(UNFINISHED)]
    found = transaction.execute(update(RESPONSES).where(*where).values(**values))
    add_bytes(transaction, response.tenant, response.id, num_bytes if found.rowcount else 0)
    return bool(found.rowcount)


def owned_by(transaction: Transaction, owner: str) -> set[tuple[str, str, int]]:
    """Returns tenant, id and attempt of the unfinished responses of one owner."""
    query = select(RESPONSES.c.tenant, RESPONSES.c.id, RESPONSES.c.attempt).where(
        RESPONSES.c.owner == owner, RESPONSES.c.status.in_(UNFINISHED)
    )
    return {(row.tenant, row.id, row.attempt) for row in transaction.execute(query)}


def renew(transaction: Transaction, owner: str, until: float) -> None:
    """Renews the leases of one owner. An `until` that is over gives them up."""
    where = [RESPONSES.c.owner == owner, RESPONSES.c.status.in_(UNFINISHED)]
    transaction.execute(update(RESPONSES).where(*where).values(lease_until=until))


def abandoned(transaction: Transaction, now: float, limit: int) -> list[ResponseRow]:
    """Returns unfinished responses whose owner's lease has run out."""
    where = [RESPONSES.c.status.in_(UNFINISHED), RESPONSES.c.lease_until < now]
    query = select(*_COLUMNS).where(*where).limit(limit)
    return [_response(row) for row in transaction.execute(query)]


def expired(transaction: Transaction, now: float, limit: int) -> list[tuple[str, str]]:
    """Returns tenant and id of responses that have expired."""
    query = select(RESPONSES.c.tenant, RESPONSES.c.id).where(RESPONSES.c.expires_at <= now)
    rows = transaction.execute(query.order_by(RESPONSES.c.tenant).limit(limit))
    return [(row.tenant, row.id) for row in rows]


def _write(
    transaction: Transaction, response: ResponseRow, values: Mapping[str, object], num_bytes: int
) -> bool:
    where = owned(RESPONSES, response, UNFINISHED)
    found = transaction.execute(update(RESPONSES).where(*where).values(**values))
    add_bytes(transaction, response.tenant, response.id, num_bytes if found.rowcount else 0)
    return bool(found.rowcount)


def add_bytes(transaction: Transaction, tenant: str, name: str, num_bytes: int) -> None:
    """Counts more bytes of a response, or fewer."""
    if num_bytes:
        counted = RESPONSES.c.num_bytes + num_bytes
        where = named(RESPONSES, tenant, name)
        transaction.execute(update(RESPONSES).where(*where).values(num_bytes=counted))
        transaction.charge(tenant, num_bytes)


def _response(row: Row[tuple[object, ...]]) -> ResponseRow:
    return ResponseRow(**row._mapping)
