"""Keeps the items of responses and conversations, each under its holder, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, func, insert, select

from router.store.sql.tables import ITEMS
from router.store.sql.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Item:
    """Is one item: `data` is its JSON, as the client or the node wrote it."""

    id: str
    data: bytes
    is_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Asks for a part of a list, as the API does. `after` is the id of the item before it."""

    limit: int = 20
    is_ascending: bool = False
    after: str = ""


def put_items(
    transaction: Transaction,
    tenant: str,
    holder: str,
    items: Sequence[Item],
    *,
    is_new: bool = False,
) -> int:
    """Adds items behind those that the holder has; one that `is_new` has none. Returns their
    bytes."""
    if not items:
        return 0
    first = 1
    if not is_new:
        last = select(func.max(ITEMS.c.place)).where(*_of(tenant, [holder]))
        first += (transaction.execute(last)).scalar() or 0
    rows = [
        {
            "tenant": tenant,
            "holder": holder,
            "place": first + i,
            "id": item.id,
            "is_output": item.is_output,
            "data": item.data,
        }
        for i, item in enumerate(items)
    ]
    transaction.execute(insert(ITEMS), rows)
    return sum(len(item.data) for item in items)


def items_of(
    transaction: Transaction, tenant: str, holders: Sequence[str]
) -> dict[str, list[Item]]:
    """Returns all items of each holder."""
    query = select(ITEMS).where(*_of(tenant, holders)).order_by(ITEMS.c.holder, ITEMS.c.place)
    found: dict[str, list[Item]] = {holder: [] for holder in holders}
    for row in transaction.execute(query):
        found[row.holder].append(Item(row.id, row.data, row.is_output))
    return found


def items_by_id(transaction: Transaction, tenant: str, names: Iterable[str]) -> dict[str, Item]:
    """Returns those of a tenant's items that have these ids."""
    query = select(ITEMS).where(ITEMS.c.tenant == tenant, ITEMS.c.id.in_(list(names)))
    return {row.id: Item(row.id, row.data, row.is_output) for row in transaction.execute(query)}


def drop_items(
    transaction: Transaction, tenant: str, holders: Sequence[str], item: str | None = None
) -> int:
    """Removes the items of holders, or one of them. Returns how many there were."""
    where = _of(tenant, holders)
    if item is not None:
        where.append(ITEMS.c.id == item)
    return (transaction.execute(delete(ITEMS).where(*where))).rowcount


def page_of(items: Sequence[Item], page: Page) -> tuple[list[Item], bool]:
    """Returns a part of a list that is in order, and whether there is more behind it. Nothing
    follows an id that is not in the list."""
    ordered = list(items) if page.is_ascending else list(reversed(items))
    if page.after:
        ids = [item.id for item in ordered]
        first = ids.index(page.after) + 1 if page.after in ids else len(ids)
        ordered = ordered[first:]
    return ordered[: page.limit], len(ordered) > page.limit


def _of(tenant: str, holders: Sequence[str]) -> list[ColumnElement[bool]]:
    return [ITEMS.c.tenant == tenant, ITEMS.c.holder.in_(holders)]
