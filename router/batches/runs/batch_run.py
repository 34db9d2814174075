"""Works on one batch, as its owner.

    validating    all lines are read; with a mistake it ends as failed
    in_progress   each line that has no answer yet is sent to nodes when these have room
    finalizing    nothing is open any more; lines that were not answered in time are errors
    cancelling    what is at nodes is cut off; what is answered stays
    over          its files are shown

Every change is a transaction of the store, and counts only while this router owns the batch: after
a kill at any moment another run goes on with what is there. A line may be computed twice then, and
is kept once: its number is its key in the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from router.batches.batch_store import BatchStore
from router.batches.errors import Lost
from router.batches.files.file_calls import BATCH_OUTPUT
from router.batches.lines.input_line import InputLine, read_line
from router.batches.lines.result_line import not_executed
from router.batches.lines.result_writer import ResultWriter
from router.batches.runs.answer import Answering
from router.batches.runs.idle_room import IdlePlace, IdleRoom
from router.batches.runs.validation import Validation, lines_of
from router.models.known_models import ModelTable
from router.observe.batch_metrics import BatchFacts, BatchTotals
from router.request.prompt_text import estimate_tokens
from router.request.tenants import Tenant
from router.store.batches import BatchRow, Progress, change, find_batch
from router.store.errors import StoreUnavailable
from router.store.files import (
    FilePart,
    FileRow,
    add_file,
    finish_file,
    hide_file,
    next_parts,
    places_between,
)
from router.store.sql.transaction import Transaction

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_S = 1.0
_EXPIRED = "This request could not be executed before the completion window expired."


@dataclass(slots=True, kw_only=True)
class BatchRun:
    """Is the work on one batch. `tenant` gives whose it is; None: that one is gone. `table` leads
    a model's name to what serves it."""

    store: BatchStore
    answering: Answering
    room: IdleRoom
    row: BatchRow
    tenant: Callable[[], Tenant | None]
    table: Callable[[], ModelTable]
    totals: BatchTotals
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _num_completed: int = 0
    _num_failed: int = 0

    def facts(self) -> BatchFacts:
        """Returns what operators see of it."""
        row = self.row
        return BatchFacts(
            id=row.id,
            tenant=row.tenant,
            model=row.model,
            status=row.status,
            num_total=row.num_total,
            num_completed=row.num_completed + self._num_completed,
            num_failed=row.num_failed + self._num_failed,
            expires_at=row.expires_at,
        )

    async def run(self) -> None:
        """Works until the batch has ended, or is another router's."""
        try:
            while not self.row.is_finished:
                await self._step()
        except* Lost:
            logger.info("batch %s: another router has it, or it is gone", self.row.id)
        except* StoreUnavailable:
            logger.warning("batch %s: the store is away; it goes on later", self.row.id)
        except* Exception:
            logger.exception("batch %s: the work on it failed; it goes on later", self.row.id)

    def stop(self) -> None:
        """Has it look at its status again: it was cancelled."""
        self._stop.set()

    async def _step(self) -> None:
        """Does what the batch's status asks for."""
        status = self.row.status
        if status == "validating":
            await self._validate()
        elif status == "in_progress":
            await self._process()
        elif status == "finalizing":
            await self._end("completed")
        else:
            await self._end("cancelled")

    # Validating --------------------------------------------------------------------------------

    async def _validate(self) -> None:
        route, most = self.table().route, self.store.limits.max_requests
        found = Validation(self.row.endpoint, most, route)
        async for part in self._parts():
            # Lines are read one part at a time: other requests have their turn in between.
            if not await asyncio.to_thread(found.take, part):
                break
        else:
            found.close()
        if found.faults:
            errors = msgspec.json.encode(found.faults)
            await self._change("failed", errors=errors, num_total=0)
            return
        until = self.row.kept_until
        files = [
            self.store.new_file(self.row.tenant, BATCH_OUTPUT, f"{self.row.id}_{what}.jsonl", until)
            for what in ("output", "error")
        ]
        named = self.row.output_file, self.row.error_file

        def add(transaction: Transaction, _: BatchRow) -> None:
            for file, name in zip(files, named, strict=True):
                add_file(transaction, _named(file, name))

        await self._change("in_progress", add, model=found.model, num_total=found.num_lines)

    # In progress -------------------------------------------------------------------------------

    async def _process(self) -> None:
        """Answers what has no answer yet, until all have, or it is too late, or cancelled."""
        writer = self._writer()
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(writer.run())
            working = group.create_task(self._answer_all(writer))
            waiting = group.create_task(self._wait_for_end())
            done, _ = await asyncio.wait({working, waiting}, return_when="FIRST_COMPLETED")
            for task in (working, waiting, writing):
                task.cancel()
        if working in done and not working.cancelled():
            await self._change("finalizing")
        elif self._is_late():
            await self._mark_late(writer)
            await self._end("expired")
        else:
            await self._look_again()

    async def _answer_all(self, writer: ResultWriter) -> None:
        turns = asyncio.Semaphore(self.store.limits.max_concurrent)
        async with asyncio.TaskGroup() as group:
            async for line in self._open_lines():
                await turns.acquire()
                place = IdlePlace(self.room, self.row.model, _num_tokens(line))
                await place.enter()
                task = group.create_task(self._answer(line, place, writer))
                task.add_done_callback(lambda _: turns.release())

    async def _answer(self, line: InputLine, place: IdlePlace, writer: ResultWriter) -> None:
        try:
            tenant = self.tenant()
            if tenant is None:
                found = not_executed(line, "invalid_api_key", "The tenant is not known any more.")
            else:
                found = await self.answering.answer(line, self.row.endpoint, tenant, place)
            await writer.put(found)
        finally:
            place.leave()

    async def _wait_for_end(self) -> None:
        """Waits until the batch is cancelled, or its window is over."""
        while not self._stop.is_set() and not self._is_late():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._stop.wait()

    async def _open_lines(self) -> AsyncIterator[InputLine]:
        """Yields the lines that have no answer, of a part of the file at a time."""
        async for part in self._parts():
            end = part.place + part.num_lines
            names = [self.row.output_file, self.row.error_file]
            tenant = self.row.tenant
            done = await self.store.database.read(
                partial(places_between, tenant=tenant, names=names, first=part.place, end=end)
            )
            for place, text in enumerate(lines_of(part), part.place):
                if place not in done:
                    yield read_line(text, place, self.row.endpoint)

    async def _mark_late(self, writer: ResultWriter) -> None:
        """Writes an error for each line that has no answer."""
        lines = []
        async for line in self._open_lines():
            lines.append(not_executed(line, "batch_expired", _EXPIRED))
            if len(lines) >= 1000:
                await writer.write(lines)
                lines = []
        if lines:
            await writer.write(lines)

    def _writer(self) -> ResultWriter:
        output, errors = (
            _named(self.store.new_file(self.row.tenant, BATCH_OUTPUT, ""), name)
            for name in (self.row.output_file, self.row.error_file)
        )
        return ResultWriter(self.store, self.row, output, errors, self._count)

    def _count(self, progress: Progress) -> None:
        self._num_completed += progress.num_completed
        self._num_failed += progress.num_failed
        self.totals.num_completed += progress.num_completed
        self.totals.num_failed += progress.num_failed

    # Its end -----------------------------------------------------------------------------------

    async def _end(self, status: str) -> None:
        """Shows the files, or removes them where they are empty."""
        now = self.store.clock()
        until = now + self.row.output_ttl_s

        def show(transaction: Transaction, row: BatchRow) -> None:
            for name, num_lines in (
                (row.output_file, row.num_completed),
                (row.error_file, row.num_failed),
            ):
                file = _named(self.store.new_file(row.tenant, BATCH_OUTPUT, ""), name)
                if num_lines:
                    what = "output" if name == row.output_file else "error"
                    finish_file(transaction, file, now, until, f"{row.id}_{what}.jsonl")
                else:
                    hide_file(transaction, row.tenant, name)

        await self._change(status, show)

    # Its row -----------------------------------------------------------------------------------

    async def _change(
        self,
        status: str,
        also: Callable[[Transaction, BatchRow], None] = lambda transaction, row: None,
        **values: object,
    ) -> None:
        """Has the batch come to another status. Where it was cancelled meanwhile, nothing is
        changed. Raises `Lost`."""
        row, now = self.row, self.store.clock()
        written = {"status": status, "times": row.when(status, now), **values}
        if status not in ("in_progress", "finalizing"):
            written |= {"owner": "", "lease_until": 0.0}

        def write(transaction: Transaction) -> BatchRow | None:
            current = find_batch(transaction, row.tenant, row.id, 0.0)
            if current is None or current.attempt != row.attempt or current.owner != row.owner:
                raise Lost
            if current.status != row.status:
                return current
            also(transaction, current)
            return change(transaction, current, written, 0.0)

        found = await self.store.database.write(write)
        if found is None:
            raise Lost
        self._take_row(found)

    async def _look_again(self) -> None:
        """Reads the row. Raises `Lost`."""
        self._stop.clear()
        row = self.row
        found = await self.store.database.read(lambda one: find_batch(one, row.tenant, row.id, 0.0))
        if found is None or (found.owner, found.attempt) != (row.owner, row.attempt):
            raise Lost
        self._take_row(found)

    def _take_row(self, row: BatchRow) -> None:
        self.row, self._num_completed, self._num_failed = row, 0, 0

    def _is_late(self) -> bool:
        return self.store.clock() >= self.row.expires_at

    async def _parts(self) -> AsyncIterator[FilePart]:
        """Yields the parts of the input file."""
        place, row = 0, self.row
        while True:
            found = await self.store.database.read(
                partial(
                    next_parts, tenant=row.tenant, name=row.input_file, place=place, max_parts=1
                )
            )
            if not found:
                return
            yield found[0]
            place = found[0].place + found[0].num_lines


def _named(file: FileRow, name: str) -> FileRow:
    return FileRow(
        tenant=file.tenant,
        id=name,
        purpose=file.purpose,
        filename=file.filename,
        created_at=file.created_at,
        expires_at=file.expires_at,
    )


def _num_tokens(line: InputLine) -> int:
    return estimate_tokens(line.body)
