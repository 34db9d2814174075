"""Is one transaction of the store. What tenants keep is counted at its end, in the order of their
names: two transactions that change several rows never wait for each other in a circle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Executable, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, CursorResult

from router.store.sql.tables import TENANTS


class Transaction:
    """Executes statements, and counts bytes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._charges: Counter[str] = Counter()

    def execute(
        self, statement: Executable, rows: Sequence[dict[str, Any]] | None = None
    ) -> CursorResult[Any]:
        return self._connection.execute(statement, rows)

    def charge(self, tenant: str, num_bytes: int) -> None:
        """Adds to what a tenant keeps, or takes away."""
        self._charges[tenant] += num_bytes

    @property
    def adds(self) -> bool:
        """Returns whether tenants keep more by it than before."""
        return self._charges.total() > 0

    def num_bytes_of(self, tenant: str) -> int:
        """Returns what a tenant keeps."""
        query = select(TENANTS.c.num_bytes).where(TENANTS.c.name == tenant)
        return int((self.execute(query)).scalar() or 0)

    def write_charges(self) -> None:
        """Writes what was counted. To be called once, at the end."""
        is_sqlite = self._connection.dialect.name == "sqlite"
        insert = sqlite.insert if is_sqlite else postgresql.insert
        for tenant, num_bytes in sorted(self._charges.items()):
            if num_bytes:
                row = insert(TENANTS).values(name=tenant, num_bytes=max(0, num_bytes))
                counted = {"num_bytes": TENANTS.c.num_bytes + num_bytes}
                self.execute(row.on_conflict_do_update(index_elements=["name"], set_=counted))
