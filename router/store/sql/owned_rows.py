"""Finds rows by whose they are, and those that a router owns for a while: what an owner writes
counts only while it is the owner still, by name and attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import ColumnElement, Table


class OwnedRow(Protocol):
    """Is a row with one owner while its `status` says that it is unfinished."""

    @property
    def tenant(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def attempt(self) -> int: ...


def named(table: Table, tenant: str, name: str) -> list[ColumnElement[bool]]:
    """Returns what is so of a tenant's row with this id."""
    return [table.c.tenant == tenant, table.c.id == name]


def owned(table: Table, row: OwnedRow, unfinished: Sequence[str]) -> list[ColumnElement[bool]]:
    """Returns what is so of a row while `row.owner` owns it."""
    return [
        *named(table, row.tenant, row.id),
        table.c.owner == row.owner,
        table.c.attempt == row.attempt,
        table.c.status.in_(unfinished),
    ]
