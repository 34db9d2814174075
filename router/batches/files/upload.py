"""Reads a form with a file in parts of whole lines, each of which may take its time.

1. a part      is read while there is room for it beside other bodies, as by
               `edge.http.bodies.body_room`: it is long where a line is
2. kept        its reader writes it, and gives its room back
3. the next    with room and time of its own: a file may be far larger than what is held of it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Receive

from edge.http.bodies.body_room import BodyLease
from edge.http.connection.client_connection import ClientDisconnected
from edge.http.errors import RequestTimeout, RequestTooLarge
from router.batches.files.form_reader import FormReader
from router.batches.files.line_cutter import LineCutter
from router.store.files import FilePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Is who sends a form: what reads from it, room for what is here of it, and the seconds that a
    part may take."""

    receive: Receive
    lease: Callable[[], BodyLease]
    part_timeout_s: float


@dataclass(slots=True)
class Upload:
    """Is read until `is_whole`. What is left of a chunk behind a part, a line's beginning, needs no
    room."""

    sender: Sender
    reader: FormReader
    cutter: LineCutter
    max_file_bytes: int
    is_whole: bool = False
    num_bytes: int = field(default=0, init=False)

    @contextmanager
    def room(self) -> Iterator[BodyLease]:
        """Gives room for a part, until it is kept."""
        with self.sender.lease() as lease:
            yield lease

    async def next_parts(self, lease: BodyLease) -> list[FilePart]:
        """Returns what is full, or what there is at the end. Raises `BadRequest`,
        `RequestTooLarge`, `RequestTimeout`, `ClientDisconnected`."""
        limit_s = self.sender.part_timeout_s
        try:
            async with asyncio.timeout(limit_s) as clock:
                while True:
                    await lease.wait(clock)
                    parts = self._take(await self._receive(lease))
                    if parts or self.is_whole:
                        return parts
        except TimeoutError:
            raise RequestTimeout(
                f"a part of the file did not arrive within {limit_s:g} s, or came slowly while "
                "others waited"
            ) from None

    async def _receive(self, lease: BodyLease) -> bytes:
        message = await self.sender.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        self.is_whole = not message.get("more_body", False)
        data: bytes = message.get("body", b"")
        lease.take(len(data))
        return data

    def _take(self, form: bytes) -> list[FilePart]:
        data = self.reader.take(form)
        self.num_bytes += len(data)
        if self.num_bytes > self.max_file_bytes:
            raise too_large(self.max_file_bytes)
        return self.cutter.feed(data) + (self.cutter.close() if self.is_whole else [])


def too_large(max_file_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the file is larger than {max_file_bytes} bytes", param="file")
