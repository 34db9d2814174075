"""Keeps batches, each with one owner while it is not finished:

    validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
        │   │           │
        │   └───────────┴──▶ cancelling ──▶ cancelled
        └──▶ failed

    claim: the lease of its owner has run out, or it has none yet; another attempt begins

What an owner writes counts only while it is the owner still, by name and attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import msgspec
from sqlalchemy import Row, delete, func, insert, select, update

from router.store.files import ListQuery, after
from router.store.sql.owned_rows import named, owned
from router.store.sql.tables import BATCHES
from router.store.sql.transaction import Transaction

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
AT_WORK = ("validating", "in_progress")
"""Statuses in which a batch can still be cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Is one batch. `times` is a JSON object of when it came to each status, `errors` a JSON list.
    Times are Unix seconds; `expires_at` ends its window, `kept_until` itself."""

    tenant: str
    id: str
    status: str = "validating"
    endpoint: str
    window: str
    model: str = ""
    input_file: str
    output_file: str
    error_file: str
    output_ttl_s: float
    created_at: float
    expires_at: float
    kept_until: float
    times: bytes = b"{}"
    metadata: bytes = b"null"
    errors: bytes = b"[]"
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    owner: str = ""
    lease_until: float = 0.0
    attempt: int = 0

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED

    def when(self, status: str, now: float) -> bytes:
        """Returns `times` with one more."""
        times = msgspec.json.decode(self.times, type=dict[str, float])
        return msgspec.json.encode({**times, f"{status}_at": now})


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts requests that have just ended, and their tokens."""

    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


_COLUMNS = [BATCHES.c[field.name] for field in fields(BatchRow)]


def add_batch(transaction: Transaction, batch: BatchRow) -> None:
    values = {field.name: getattr(batch, field.name) for field in fields(BatchRow)}
    transaction.execute(insert(BATCHES).values(**values))


def find_batch(transaction: Transaction, tenant: str, name: str, now: float) -> BatchRow | None:
    query = select(*_COLUMNS).where(*named(BATCHES, tenant, name), BATCHES.c.kept_until > now)
    row = transaction.execute(query).first()
    return None if row is None else _batch(row)


def list_batches(
    transaction: Transaction, tenant: str, page: ListQuery, now: float
) -> tuple[list[BatchRow], bool]:
    """Returns some of a tenant's batches, the newest first, and whether there are more."""
    where = [BATCHES.c.tenant == tenant, BATCHES.c.kept_until > now]
    keys = BATCHES.c.created_at, BATCHES.c.id
    if page.after:
        last = find_batch(transaction, tenant, page.after, now)
        if last is None:
            return [], False
        where.append(after(keys, (last.created_at, last.id), is_ascending=False))
    order = [key.desc() for key in keys]
    query = select(*_COLUMNS).where(*where).order_by(*order).limit(page.limit + 1)
    found = [_batch(row) for row in transaction.execute(query)]
    return found[: page.limit], len(found) > page.limit


def num_unfinished(transaction: Transaction, tenant: str) -> int:
    """Returns how many batches of a tenant have not ended."""
    where = [BATCHES.c.tenant == tenant, BATCHES.c.status.in_(UNFINISHED)]
    query = select(func.count()).select_from(BATCHES).where(*where)
    return int(transaction.execute(query).scalar() or 0)


def uses_file(transaction: Transaction, tenant: str, file: str) -> bool:
    """Returns whether a batch that has not ended reads a file."""
    where = [BATCHES.c.tenant == tenant, BATCHES.c.input_file == file]
    query = select(BATCHES.c.id).where(*where, BATCHES.c.status.in_(UNFINISHED)).limit(1)
    return transaction.execute(query).first() is not None


def change(
    transaction: Transaction, batch: BatchRow, values: Mapping[str, object], now: float
) -> BatchRow | None:
    """Writes what the owner of a batch has found. Returns the batch as it is then; None: it is not
    the owner any more, or the batch has another status."""
    where = [*owned(BATCHES, batch, UNFINISHED), BATCHES.c.status == batch.status]
    if not transaction.execute(update(BATCHES).where(*where).values(**values)).rowcount:
        return None
    return find_batch(transaction, batch.tenant, batch.id, now)


def count(transaction: Transaction, batch: BatchRow, progress: Progress) -> bool:
    """Counts requests that have ended. Returns whether the owner still is that."""
    values = {
        field.name: BATCHES.c[field.name] + getattr(progress, field.name)
        for field in fields(Progress)
    }
    found = transaction.execute(
        update(BATCHES).where(*owned(BATCHES, batch, UNFINISHED)).values(**values)
    )
    return bool(found.rowcount)


def cancel(transaction: Transaction, batch: BatchRow, now: float) -> bool:
    """Has a batch cancelled, whatever router works on it. Returns whether it was at work."""
    where = [*named(BATCHES, batch.tenant, batch.id), BATCHES.c.status == batch.status]
    values = {"status": "cancelling", "times": batch.when("cancelling", now)}
    return bool(transaction.execute(update(BATCHES).where(*where).values(**values)).rowcount)


def claim(
    transaction: Transaction, batch: BatchRow, owner: str, lease_until: float, now: float
) -> BatchRow | None:
    """Makes `owner` the owner of a batch whose lease has run out. Returns it as it is then; None:
    another one was faster."""
    values = {"owner": owner, "lease_until": lease_until, "attempt": batch.attempt + 1}
    where = [*owned(BATCHES, batch, UNFINISHED), BATCHES.c.lease_until == batch.lease_until]
    if not transaction.execute(update(BATCHES).where(*where).values(**values)).rowcount:
        return None
    return find_batch(transaction, batch.tenant, batch.id, now)


def renew(transaction: Transaction, owner: str, until: float) -> None:
    """Renews the leases of one owner. An `until` that is over gives them up."""
    where = [BATCHES.c.owner == owner, BATCHES.c.status.in_(UNFINISHED)]
    transaction.execute(update(BATCHES).where(*where).values(lease_until=until))


def yield_batch(transaction: Transaction, key: tuple[str, str, int], until: float) -> None:
    """Gives up one batch, by tenant, id and attempt. It has no owner, and may be taken after
    `until`."""
    tenant, name, attempt = key
    where = [
        *named(BATCHES, tenant, name),
        BATCHES.c.attempt == attempt,
        BATCHES.c.status.in_(UNFINISHED),
    ]
    values = {"owner": "", "lease_until": until}
    transaction.execute(update(BATCHES).where(*where).values(**values))


def owned_by(transaction: Transaction, owner: str) -> dict[tuple[str, str, int], str]:
    """Returns the status of each unfinished batch of one owner, by tenant, id and attempt."""
    columns = BATCHES.c.tenant, BATCHES.c.id, BATCHES.c.attempt, BATCHES.c.status
    where = [BATCHES.c.owner == owner, BATCHES.c.status.in_(UNFINISHED)]
    rows = transaction.execute(select(*columns).where(*where))
    return {(row.tenant, row.id, row.attempt): row.status for row in rows}


def abandoned(transaction: Transaction, now: float, limit: int) -> Sequence[BatchRow]:
    """Returns unfinished batches without an owner, the oldest first."""
    where = [BATCHES.c.status.in_(UNFINISHED), BATCHES.c.lease_until < now]
    query = select(*_COLUMNS).where(*where).order_by(BATCHES.c.created_at).limit(limit)
    return [_batch(row) for row in transaction.execute(query)]


def drop_expired(transaction: Transaction, now: float) -> int:
    """Removes batches that are kept no longer. Returns how many there were."""
    where = [BATCHES.c.kept_until <= now, BATCHES.c.status.not_in(UNFINISHED)]
    return transaction.execute(delete(BATCHES).where(*where)).rowcount


def _batch(row: Row[tuple[object, ...]]) -> BatchRow:
    return BatchRow(**row._mapping)
