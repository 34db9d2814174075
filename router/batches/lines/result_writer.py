"""Writes what requests of one batch came to, many at once: a transaction for each would be the
slowest part of a batch of short ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from router.batches.batch_store import BatchStore
from router.batches.errors import Lost
from router.batches.lines.result_line import ResultLine
from router.store.batches import BatchRow, Progress, count
from router.store.errors import StoreUnavailable
from router.store.files import FilePart, FileRow, add_parts, places_among
from router.store.sql.transaction import Transaction

_PAUSE_S = 0.05
_RETRY_S = 1.0


@dataclass(slots=True)
class ResultWriter:
    """Writes for the owner of `batch`. Files are those of its output and its errors."""

    store: BatchStore
    batch: BatchRow
    output: FileRow
    errors: FileRow
    on_kept: Callable[[Progress], None]
    _waiting: list[tuple[ResultLine, asyncio.Future[None]]] = field(default_factory=list)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, line: ResultLine) -> None:
        """Returns when the line is kept. Raises `Lost`."""
        kept = asyncio.get_running_loop().create_future()
        self._waiting.append((line, kept))
        self._has_news.set()
        await kept

    async def run(self) -> None:
        """Writes until cancelled. Raises `Lost` when the batch is another router's."""
        while True:
            await self._has_news.wait()
            await asyncio.sleep(_PAUSE_S)
            self._has_news.clear()
            taken, self._waiting = self._waiting, []
            try:
                await self.write([line for line, _ in taken])
            except Lost as lost:
                for _, kept in taken:
                    if not kept.done():
                        kept.set_exception(lost)
                raise
            for _, kept in taken:
                if not kept.done():
                    kept.set_result(None)

    async def write(self, lines: list[ResultLine]) -> None:
        """Keeps lines, all or none, however long the store is away. A transaction that was given
        up may have been kept all the same, so those that are there are left out. Raises `Lost`."""

        def write(transaction: Transaction) -> None:
            names, places = [self.output.id, self.errors.id], [line.place for line in lines]
            kept = places_among(transaction, self.batch.tenant, names, places)
            self._add(transaction, [line for line in lines if line.place not in kept])

        while True:
            try:
                await self.store.database.write(write)
                self.on_kept(_progress(lines))
                return
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)

    def _add(self, transaction: Transaction, lines: list[ResultLine]) -> None:
        if not count(transaction, self.batch, _progress(lines)):
            raise Lost
        for file, is_error in ((self.output, False), (self.errors, True)):
            parts = [FilePart(one.place, 1, one.data) for one in lines if one.is_error is is_error]
            if not add_parts(transaction, file, parts):
                raise Lost


def _progress(lines: list[ResultLine]) -> Progress:
    parts = [line.progress for line in lines]
    totals = {one.name: sum(getattr(part, one.name) for part in parts) for one in fields(Progress)}
    return Progress(**totals)
