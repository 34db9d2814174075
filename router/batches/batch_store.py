"""Is the store of files and batches with its bounds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.batches.errors import NotThere, TooMany
from router.batches.settings import BatchLimits
from router.store.batches import BatchRow, find_batch
from router.store.files import FileRow, account, find_file
from router.store.sql.database import Database
from router.store.sql.transaction import Transaction

_MAX_SHOWN = 128
WRITING_S = 86_400.0
"""Seconds after which a file that is still not whole is removed; a batch that writes it renews
that."""


@dataclass(slots=True)
class BatchStore:
    """Finds what belongs to a tenant. `clock` gives Unix seconds."""

    database: Database
    limits: BatchLimits
    clock: Callable[[], float] = time.time

    def file(
        self, transaction: Transaction, tenant: str, name: str, *, param: str = "file_id"
    ) -> FileRow:
        """Returns a file of the tenant, which the field `param` names. Raises `NotThere`."""
        found = find_file(transaction, tenant, name, self.clock())
        if found is None:
            raise NotThere(f"There is no file {name[:_MAX_SHOWN]!r}.", param=param)
        return found

    def batch(self, transaction: Transaction, tenant: str, name: str) -> BatchRow:
        """Returns a batch of the tenant. Raises `NotThere`."""
        found = find_batch(transaction, tenant, name, self.clock())
        if found is None:
            raise NotThere(f"There is no batch {name[:_MAX_SHOWN]!r}.", param="batch_id")
        return found

    def check_room(self, transaction: Transaction, tenant: str, num_bytes: int = 0) -> None:
        """Raises `TooMany` where a tenant's files have as many bytes as they may."""
        most = self.limits.max_bytes_per_tenant
        if most and transaction.num_bytes_of(account(tenant)) + num_bytes > most:
            raise TooMany(
                f"Your files may have {most} bytes together. Delete some: they are kept until they "
                "expire."
            )

    def new_file(self, tenant: str, purpose: str, filename: str, until: float = 0.0) -> FileRow:
        """Returns a file that is not whole yet. `until`: when it is removed if it never is."""
        now = self.clock()
        return FileRow(
            tenant=tenant,
            id=new_id("file-"),
            purpose=purpose,
            filename=filename,
            created_at=now,
            expires_at=max(until, now) + WRITING_S,
        )


def new_id(prefix: str) -> str:
    """Returns an id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(16)}"
