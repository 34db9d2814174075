"""Keeps files: what clients uploaded, and what batches answered.

    begun ──▶ parts are added ──▶ whole: clients see it ──▶ hidden: parts are removed

A file is cut into parts of whole lines, so that none of its size is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Row, delete, func, insert, select, update

from router.store.sql.owned_rows import named
from router.store.sql.tables import FILES, PARTS
from router.store.sql.transaction import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """Is one file. Times are Unix seconds."""

    tenant: str
    id: str
    purpose: str
    filename: str
    created_at: float
    expires_at: float
    num_bytes: int = 0
    num_lines: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class FilePart:
    """Is a part of a file: `data` has whole lines, of which the first has the number `place`,
    from 0."""

    place: int
    num_lines: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """Asks for some of a tenant's files or batches: those that follow `after` in a list, and of
    files those of `purpose`, if it is not empty."""

    limit: int = 10_000
    is_ascending: bool = False
    after: str = ""
    purpose: str = ""


_COLUMNS = [FILES.c[name] for name in FileRow.__slots__]


def account(tenant: str) -> str:
    """Returns the name under which the bytes of a tenant's files are counted. No tenant is named
    so."""
    return f"files of {tenant}"


def add_file(transaction: Transaction, file: FileRow) -> None:
    values = {name: getattr(file, name) for name in FileRow.__slots__}
    transaction.execute(insert(FILES).values(**values))


def add_parts(transaction: Transaction, file: FileRow, parts: Sequence[FilePart]) -> bool:
    """Adds parts. Returns False, and adds none, where the file was removed meanwhile."""
    num_bytes = sum(len(part.data) for part in parts)
    counted = {
        "num_bytes": FILES.c.num_bytes + num_bytes,
        "num_lines": FILES.c.num_lines + sum(part.num_lines for part in parts),
    }
    where = named(FILES, file.tenant, file.id)
    if not transaction.execute(update(FILES).where(*where).values(**counted)).rowcount:
        return False
    if parts:
        rows = [
            {
                "tenant": file.tenant,
                "file": file.id,
                "place": part.place,
                "num_lines": part.num_lines,
                "data": part.data,
            }
            for part in parts
        ]
        transaction.execute(insert(PARTS), rows)
        transaction.charge(account(file.tenant), num_bytes)
    return True


def finish_file(
    transaction: Transaction, file: FileRow, now: float, expires_at: float, filename: str
) -> FileRow | None:
    """Shows a file to its tenant from now on. Returns it; None where it was removed meanwhile."""
    values = {
        "is_whole": True,
        "created_at": now,
        "expires_at": expires_at,
        "filename": filename,
    }
    transaction.execute(update(FILES).where(*named(FILES, file.tenant, file.id)).values(**values))
    return find_file(transaction, file.tenant, file.id, now)


def find_file(transaction: Transaction, tenant: str, name: str, now: float) -> FileRow | None:
    """Returns a whole file that has not expired."""
    query = select(*_COLUMNS).where(*named(FILES, tenant, name), *_is_seen(now))
    row = transaction.execute(query).first()
    return None if row is None else _file(row)


def list_files(
    transaction: Transaction, tenant: str, page: ListQuery, now: float
) -> tuple[list[FileRow], bool]:
    """Returns some of a tenant's files, and whether there are more behind them."""
    where = [FILES.c.tenant == tenant, *_is_seen(now)]
    if page.purpose:
        where.append(FILES.c.purpose == page.purpose)
    keys = FILES.c.created_at, FILES.c.id
    if page.after:
        last = find_file(transaction, tenant, page.after, now)
        if last is None:
            return [], False
        place = (last.created_at, last.id)
        where.append(after(keys, place, is_ascending=page.is_ascending))
    order = [key.asc() if page.is_ascending else key.desc() for key in keys]
    query = select(*_COLUMNS).where(*where).order_by(*order).limit(page.limit + 1)
    found = [_file(row) for row in transaction.execute(query)]
    return found[: page.limit], len(found) > page.limit


def after(
    keys: tuple[ColumnElement[float], ColumnElement[str]],
    place: tuple[float, str],
    *,
    is_ascending: bool,
) -> ColumnElement[bool]:
    """Returns the condition of rows that come behind a place, by time and then by id."""
    time, name = keys
    if is_ascending:
        return (time > place[0]) | ((time == place[0]) & (name > place[1]))
    return (time < place[0]) | ((time == place[0]) & (name < place[1]))


def next_parts(
    transaction: Transaction, tenant: str, name: str, place: int, max_parts: int
) -> list[FilePart]:
    """Returns some of the parts from `place` on."""
    columns = PARTS.c.place, PARTS.c.num_lines, PARTS.c.data
    where = [*_of(tenant, name), PARTS.c.place >= place]
    query = select(*columns).where(*where).order_by(PARTS.c.place).limit(max_parts)
    return [FilePart(row.place, row.num_lines, row.data) for row in transaction.execute(query)]


def places_between(
    transaction: Transaction, tenant: str, names: Sequence[str], first: int, end: int
) -> set[int]:
    """Returns the places that any of the files has, from `first` up to `end`."""
    where = [PARTS.c.tenant == tenant, PARTS.c.file.in_(names)]
    where += [PARTS.c.place >= first, PARTS.c.place < end]
    return {row.place for row in transaction.execute(select(PARTS.c.place).where(*where))}


def places_among(
    transaction: Transaction, tenant: str, names: Sequence[str], places: Sequence[int]
) -> set[int]:
    """Returns which of these places any of the files has."""
    where = [PARTS.c.tenant == tenant, PARTS.c.file.in_(names), PARTS.c.place.in_(places)]
    return {row.place for row in transaction.execute(select(PARTS.c.place).where(*where))}


def hide_file(transaction: Transaction, tenant: str, name: str) -> None:
    """Has a file hidden, and expired: `drop_some` removes it."""
    values = {"is_whole": False, "expires_at": 0.0}
    transaction.execute(update(FILES).where(*named(FILES, tenant, name)).values(**values))


def drop_some(transaction: Transaction, tenant: str, name: str, max_parts: int) -> bool:
    """Removes some parts of a file, and the file with the last of them. Returns whether all is
    gone."""
    size = func.length(PARTS.c.data).label("size")
    query = select(PARTS.c.place, size).where(*_of(tenant, name)).order_by(PARTS.c.place)
    found = transaction.execute(query.limit(max_parts)).all()
    if found:
        where = [*_of(tenant, name), PARTS.c.place <= found[-1].place]
        transaction.execute(delete(PARTS).where(*where))
        transaction.charge(account(tenant), -sum(row.size for row in found))
    if len(found) == max_parts:
        return False
    transaction.execute(delete(FILES).where(*named(FILES, tenant, name)))
    return True


def expired_files(transaction: Transaction, now: float, limit: int) -> list[tuple[str, str]]:
    """Returns tenant and id of files that have expired."""
    query = select(FILES.c.tenant, FILES.c.id).where(FILES.c.expires_at <= now)
    rows = transaction.execute(query.order_by(FILES.c.tenant).limit(limit))
    return [(row.tenant, row.id) for row in rows]


def _is_seen(now: float) -> list[ColumnElement[bool]]:
    return [FILES.c.is_whole.is_(True), FILES.c.expires_at > now]


def _of(tenant: str, name: str) -> list[ColumnElement[bool]]:
    return [PARTS.c.tenant == tenant, PARTS.c.file == name]


def _file(row: Row[tuple[object, ...]]) -> FileRow:
    return FileRow(**row._mapping)
