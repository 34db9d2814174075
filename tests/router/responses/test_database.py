"""Transactions of SQLite: where they run, what becomes of those that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from router.store.errors import StoreUnavailable
from router.store.sql.database import Database
from router.store.sql.transaction import Transaction

WAIT_S = 30.0


@contextlib.asynccontextmanager
async def open_database(path: Path, timeout_s: float = WAIT_S) -> AsyncIterator[Database]:
    database = Database(f"sqlite:///{path}", timeout_s, lambda kind, seconds, has_failed: None)
    try:
        yield database
    finally:
        await database.close()


def num_bytes(transaction: Transaction) -> int:
    return transaction.num_bytes_of("one")


class SlowWork:
    """Charges a byte, and ends when it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, transaction: Transaction) -> int:
        transaction.charge("one", 1)
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        return threading.get_ident()


async def test_a_write_is_beside_the_loop_and_readers_are_beside_it(store: Path) -> None:
    async with open_database(store) as database:
        work = SlowWork()
        writing = asyncio.create_task(database.write(work))
        await asyncio.to_thread(work.has_begun.wait)
        assert await database.read(num_bytes) == 0
        work.may_end.set()
        assert await writing != threading.get_ident()
        assert await database.read(num_bytes) == 1


async def test_a_write_whose_caller_left_is_not_kept(store: Path) -> None:
    async with open_database(store) as database:
        work = SlowWork()
        writing = asyncio.create_task(database.write(work))
        await asyncio.to_thread(work.has_begun.wait)
        waiting = asyncio.create_task(database.write(SlowWork()))
        await asyncio.sleep(0)
        for task in (writing, waiting):
            task.cancel()
        await asyncio.gather(writing, waiting, return_exceptions=True)
        work.may_end.set()
        await database.write(lambda transaction: transaction.charge("one", 5))
        assert await database.read(num_bytes) == 5


async def test_a_write_that_takes_too_long_is_not_kept(store: Path) -> None:
    async with open_database(store) as first:
        assert await first.read(num_bytes) == 0
    async with open_database(store, 0.05) as database:
        work = SlowWork()
        with pytest.raises(StoreUnavailable):
            await database.write(work)
        work.may_end.set()
    async with open_database(store) as after:
        assert await after.read(num_bytes) == 0


async def test_what_a_transaction_raises_undoes_it(store: Path) -> None:
    def fail(transaction: Transaction) -> None:
        transaction.charge("one", 7)
        transaction.write_charges()
        raise KeyError("mine")

    async with open_database(store) as database:
        with pytest.raises(KeyError):
            await database.write(fail)
        assert await database.read(num_bytes) == 0


async def test_a_disk_that_is_full_is_a_store_that_is_away(store: Path) -> None:
    """An error of SQLite outside of a transaction ended all sweeping until the next start."""
    async with open_database(store) as database:
        await database.write(lambda transaction: transaction.charge("one", 1))
        with full_disk(), pytest.raises(StoreUnavailable):
            await database.forget_deleted()
        await database.forget_deleted()
        assert await database.read(num_bytes) == 1


async def test_a_file_that_was_removed_takes_nothing_more(store: Path) -> None:
    """It would be kept as long as this process holds the file open, and be gone then."""
    async with open_database(store) as database:
        await database.write(lambda transaction: transaction.charge("one", 1))
        store.unlink()
        with pytest.raises(StoreUnavailable):
            await database.write(lambda transaction: transaction.charge("one", 1))


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
