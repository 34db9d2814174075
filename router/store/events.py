"""Keeps the events of a background response that is streamed, so that any router can go on with
its stream."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from sqlalchemy import insert, select

from router.store.responses import ResponseRow, add_bytes
from router.store.sql.tables import EVENTS
from router.store.sql.transaction import Transaction

_END = b"\n\n"


def put_events(
    transaction: Transaction, response: ResponseRow, first: int, events: Sequence[bytes]
) -> None:
    """Adds a batch of events, of which the first has the number `first`."""
    if not events:
        return
    data = zlib.compress(b"".join(events), 1)
    row = {"tenant": response.tenant, "response": response.id, "first": first}
    transaction.execute(insert(EVENTS).values(**row, count=len(events), data=data))
    add_bytes(transaction, response.tenant, response.id, len(data))


def events_from(transaction: Transaction, tenant: str, response: str, first: int) -> list[bytes]:
    """Returns the events from the number `first` on."""
    of_response = EVENTS.c.tenant == tenant, EVENTS.c.response == response
    wanted = EVENTS.c.first + EVENTS.c.count > first
    found: list[bytes] = []
    for row in transaction.execute(
        select(EVENTS).where(*of_response, wanted).order_by(EVENTS.c.first)
    ):
        events = [text + _END for text in zlib.decompress(row.data).split(_END) if text]
        found += events[max(0, first - row.first) :]
    return found


def num_events(transaction: Transaction, tenant: str, response: str) -> int:
    """Returns how many events there are."""
    query = (
        select(EVENTS.c.first + EVENTS.c.count)
        .where(EVENTS.c.tenant == tenant, EVENTS.c.response == response)
        .order_by(EVENTS.c.first.desc())
        .limit(1)
    )
    return int((transaction.execute(query)).scalar() or 0)
