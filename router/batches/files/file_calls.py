"""Answers what clients ask of files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial

from edge.http.errors import BadRequest
from router.batches.batch_store import BatchStore
from router.batches.bodies import encode, file_object, list_object
from router.batches.errors import InUse
from router.batches.files.form_reader import FormReader
from router.batches.files.line_cutter import LineCutter
from router.batches.files.upload import Sender, Upload, too_large
from router.store.batches import uses_file
from router.store.files import (
    FilePart,
    FileRow,
    ListQuery,
    add_file,
    add_parts,
    finish_file,
    hide_file,
    list_files,
    next_parts,
)
from router.store.sql.transaction import Transaction

BATCH, BATCH_OUTPUT = "batch", "batch_output"
_LEAST_TTL_S, _MOST_TTL_S = 3600, 2_592_000
_FORM_BYTES = 1 << 20
"""The bytes that a form may have besides its file."""
_READ_PARTS = 64
"""Parts read at once: results of batches are one line each."""


@dataclass(frozen=True, slots=True)
class FileCalls:
    """Answers with JSON. Every call raises `NotThere` for an id that the tenant does not have, and
    `StoreUnavailable`."""

    store: BatchStore

    async def create(self, tenant: str, headers: Mapping[str, str], sender: Sender) -> bytes:
        """Keeps the file of a form, a part at a time. Raises `BadRequest`, `RequestTooLarge`,
        `RequestTimeout`, `TooMany`, and `ClientDisconnected`: then nothing of it is kept."""
        reader = FormReader.of_headers(headers)
        length = int(headers.get("content-length", "0") or 0)
        if length > self.store.limits.max_file_bytes + _FORM_BYTES:
            raise too_large(self.store.limits.max_file_bytes)
        file = self.store.new_file(tenant, BATCH, "")

        def begin(transaction: Transaction) -> None:
            self.store.check_room(transaction, tenant, length)
            add_file(transaction, file)

        await self.store.database.write(begin)
        try:
            await self._receive(reader, file, sender)
            return await self._finish(reader, file)
        except BaseException:
            await self.store.database.write(lambda one: hide_file(one, tenant, file.id))
            raise

    async def retrieve(self, tenant: str, name: str) -> bytes:
        file = await self.store.database.read(lambda one: self.store.file(one, tenant, name))
        return encode(file_object(file))

    async def list_all(self, tenant: str, page: ListQuery) -> bytes:
        now = self.store.clock()
        found, has_more = await self.store.database.read(
            lambda one: list_files(one, tenant, page, now)
        )
        return list_object([file_object(file) for file in found], has_more)

    async def delete(self, tenant: str, name: str) -> bytes:
        """Raises `InUse` while a batch reads it."""

        def write(transaction: Transaction) -> None:
            file = self.store.file(transaction, tenant, name)
            if uses_file(transaction, tenant, file.id):
                raise InUse("A batch that has not ended reads the file. Cancel the batch first.")
            hide_file(transaction, tenant, file.id)

        await self.store.database.write(write)
        return encode({"id": name, "object": "file", "deleted": True})

    async def content(self, tenant: str, name: str) -> tuple[int, AsyncIterator[bytes]]:
        """Returns how many bytes a file has, and these."""
        file = await self.store.database.read(lambda one: self.store.file(one, tenant, name))
        return file.num_bytes, self._content(file)

    async def _content(self, file: FileRow) -> AsyncIterator[bytes]:
        place, most = 0, _READ_PARTS if file.purpose == BATCH_OUTPUT else 1
        while True:
            asked = partial(
                next_parts, tenant=file.tenant, name=file.id, place=place, max_parts=most
            )
            found = await self.store.database.read(asked)
            if not found:
                return
            for part in found:
                yield part.data
            place = found[-1].place + 1

    async def _receive(self, reader: FormReader, file: FileRow, sender: Sender) -> None:
        limits = self.store.limits
        upload = Upload(sender, reader, LineCutter(limits.max_line_bytes), limits.max_file_bytes)
        while not upload.is_whole:
            with upload.room() as lease:
                if parts := await upload.next_parts(lease):
                    await self.store.database.write(partial(self._add, file=file, parts=parts))

    def _add(self, transaction: Transaction, *, file: FileRow, parts: list[FilePart]) -> None:
        self.store.check_room(transaction, file.tenant, sum(len(part.data) for part in parts))
        add_parts(transaction, file, parts)

    async def _finish(self, reader: FormReader, file: FileRow) -> bytes:
        if not reader.is_whole or not reader.has_file:
            raise BadRequest("the form must have a field 'file', and an end", param="file")
        purpose = reader.fields.get("purpose", "")
        if purpose != BATCH:
            raise BadRequest(
                f"files are for batches here: purpose must be '{BATCH}', not {purpose[:64]!r}",
                param="purpose",
            )
        now = self.store.clock()
        ttl_s = ttl_of(
            reader.fields.get("expires_after[anchor]"),
            reader.fields.get("expires_after[seconds]"),
            self.store.limits.ttl_s,
            "expires_after",
        )

        def write(transaction: Transaction) -> FileRow | None:
            named = reader.filename or "upload"
            return finish_file(transaction, file, now, now + ttl_s, named)

        found = await self.store.database.write(write)
        if found is None:
            raise BadRequest("the file was removed while it was written", param="file")
        return encode(file_object(found))


def ttl_of(anchor: object, seconds: object, default_s: float, param: str) -> float:
    """Returns the seconds that a file is kept from its creation. Raises `BadRequest`."""
    if anchor is None and seconds is None:
        return default_s
    text = str(seconds)
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if anchor != "created_at" or not is_number:
        raise BadRequest(f"{param} must have the anchor created_at, and seconds", param=param)
    if not _LEAST_TTL_S <= int(text) <= _MOST_TTL_S:
        raise BadRequest(
            f"{param}.seconds must be {_LEAST_TTL_S} to {_MOST_TTL_S}", param=f"{param}.seconds"
        )
    return float(text)
