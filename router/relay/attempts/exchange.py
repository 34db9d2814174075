"""Makes one attempt to have one request answered by one decode node.

1. made      the request counts as work of the decode node and of the first prefill node
2. open()    the head and the first chunk of the answer are here: the prompt is computed,
             so it no longer counts on the prefill node. Until now another node may be tried.
3. read…     the rest of the answer
             A journal's reader notes what of it is progress
4. close()   nothing counts any more; if the answer is not complete, the node is hung up on,
             which makes it abort the request
-  give_up() what waits for the node now learns that it is lost, and why
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http import HTTPStatus

from edge.http import headers as names
from router.errors import NodeLost
from router.nodes.http.transport import Transport, UpstreamResponse
from router.placement.policy import Placement
from router.placement.prefill_outcome import PrefillOutcome

_MAX_BUFFERED_BYTES = 1 << 20
"""A plain (not streamed) answer up to this size is read whole before any of it is passed on, so
that a node lost in the middle of it costs the client nothing."""

_ERRORS = frozenset(status for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)

_PASSED = frozenset(
    b"content-type content-length cache-control retry-after x-tandem-prefill-node".split()
)
"""Headers of a node that a client gets; the rest is between the node and us."""


class Exchange:
    """`status`, `first_chunk` and what the answer is are meaningful once `open` has returned. It is
    in `open_ones` until it is closed."""

    def __init__(self, placement: Placement, open_ones: set[Exchange]) -> None:
        self.placement = placement
        self.status = 0
        self.first_chunk = b""
        self.outcome = PrefillOutcome()
        """Is what the node says of the prompt; set by its reader."""
        self.asked_at = time.monotonic()
        self.begun_at = self.asked_at
        """Monotonic seconds at which the beginning of the answer was here."""
        self.num_before = 0
        """Tokens of the answer that other nodes had brought before."""
        self.waiting_since: float | None = self.asked_at
        """Monotonic seconds; None while nothing waits for the node."""
        self.progress_at = self.asked_at
        """Monotonic seconds of the last part of the answer; signs of life are none."""
        self.is_event_stream = False
        self.is_journaled = False
        self.journal_number = 0
        self._silence = ""
        self._head_deadline: asyncio.Timeout | None = None
        self._open_ones = open_ones
        open_ones.add(self)
        self._response: UpstreamResponse | None = None
        self._complete = False
        self._work = ExitStack()
        self._work.enter_context(placement.hold_decode())
        self._prefill_work = ExitStack()
        self._prefill_work.enter_context(placement.hold_prefill())

    async def open(
        self, transport: Transport, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Sends the request and waits for the beginning of the answer.

        Raises `NodeUnreachable` or `NodeLost`.
        """
        url = f"http://{self.placement.decode.address.target}{path}"
        try:
            async with asyncio.timeout(None) as self._head_deadline:
                self._response = await transport.request("POST", url, headers, body)
        except TimeoutError:
            raise NodeLost(self._silence) from None
        self.status = self._response.status
        self.progress_at = time.monotonic()
        if self.status != HTTPStatus.OK and self.status not in _ERRORS:
            raise NodeLost(f"it has answered with the status {self.status}, as no node does")
        kind = self._header(b"content-type")
        self.is_event_stream = kind.startswith(b"text/event-stream")
        self._read_journal_header()
        self.first_chunk = await self._read_beginning()
        self.begun_at = time.monotonic()
        self._prefill_work.close()

    async def stream(self, take: Callable[[bytes, float], bool]) -> bool:
        """Gives the rest of the answer to `take`, piece by piece on the stack that has read it,
        with the time. Returns True when it is complete, False when `take` wants no more for now:
        then it may be called again. Raises `NodeLost`."""
        if self._complete or self._response is None:
            return True

        def on_chunk(chunk: bytes) -> bool:
            self.waiting_since = now = time.monotonic()
            if not self.is_journaled and not _is_comment(chunk):
                self.progress_at = now
            return take(chunk, now)

        self.waiting_since = time.monotonic()
        try:
            self._complete = await self._response.stream(on_chunk)
        except NodeLost as error:
            if not self._silence:
                raise
            raise NodeLost(self._silence) from error
        self.waiting_since = None
        return self._complete

    async def read_chunk(self) -> bytes:
        """Returns the next piece of the answer; b"" when it is complete. Raises `NodeLost`."""
        got: list[bytes] = []

        def take(chunk: bytes, now: float) -> bool:
            got.append(chunk)
            return False

        await self.stream(take)
        return got[0] if got else b""

    def give_up(self, why: str) -> None:
        """Ends the waiting: `open`, `stream` and `read_chunk` raise `NodeLost(why)`."""
        self._silence = why
        if self._response is not None:
            self._response.close()
        elif self._head_deadline is not None:
            self._head_deadline.reschedule(asyncio.get_running_loop().time())

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns what the client gets to see of the node's headers, names in lower case, and which
        model it serves."""
        model = names.encode_name(self.placement.decode.model).encode()
        passed = [(name, value) for name, value in self.node_headers() if name in _PASSED]
        return [*passed, (names.MODEL_VERSION.encode(), model)]

    def node_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns all that the node said, names in lower case."""
        headers = self._response.headers if self._response else ()
        return [(name.lower(), value) for name, value in headers]

    def close(self) -> None:
        self._open_ones.discard(self)
        if self._response is not None:
            self._response.close()
        self._prefill_work.close()
        self._work.close()

    async def _read_beginning(self) -> bytes:
        chunk = await self.read_chunk()
        if self.is_event_stream or self.is_journaled:
            return chunk
        parts, size = [chunk], len(chunk)
        while size < _MAX_BUFFERED_BYTES and (chunk := await self.read_chunk()):
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts)

    def _header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self.node_headers() if name == wanted), b"")

    def _read_journal_header(self) -> None:
        number = self._header(names.JOURNAL.encode())
        self.is_journaled = self.status == 200 and number.isdigit()
        if self.is_journaled:
            self.journal_number = int(number)


def _is_comment(chunk: bytes) -> bool:
    """Returns whether these lines of a stream of events have nothing but comments."""
    return chunk.startswith(b":") and all(
        line[:1] in (b":", b"") for line in chunk.replace(b"\r", b"").split(b"\n")
    )
