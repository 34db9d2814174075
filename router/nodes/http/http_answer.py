"""Is one answer of a node, as it comes.

1. awaited   until its head is here
2. begun     `stream` hands over the bytes of each read within the event loop's call that has read
             them: no task is woken for a token. While nothing takes them they are held, and beyond
             `_MAX_HELD_BYTES` the node is not read from, which stops its sending
3. whole     its connection may serve another request, whether or not all was taken
-  lost      ended in the midst, silent for too long, or no HTTP: what came is taken first
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import httptools

from router.errors import NodeLost

Take = Callable[[bytes], bool]
"""Takes bytes of a body as they come. Returns whether more may come at once."""

_MAX_HELD_BYTES = 128 << 10
_MAX_UNUSED_BYTES = 64 << 10
"""Bytes of heads, or of framing between bytes of a body, that no sane node sends."""
_NO_HTTP = "its answer is no HTTP"


class AnswerLine(Protocol):
    """Is the connection on which an answer comes."""

    def stop_reading(self) -> None: ...
    def read_on(self) -> None: ...

    def head_came(self) -> None:
        """Is called when the request was answered, be it sent or not."""

    def ended(self, *, is_kept: bool) -> None:
        """Is called once, when nothing more of the answer is awaited. `is_kept`: another request
        may follow."""


class HttpAnswer:
    """`status` and `headers` are there when `wait_for_head` has returned. Must be closed."""

    def __init__(self, line: AnswerLine, read_timeout_s: float) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_awaited = True
        """It is, until the head is here."""
        self._line: AnswerLine | None = line
        self._read_timeout_s = read_timeout_s
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._came: list[bytes] = []
        """Pieces of the body in the read that is being parsed."""
        self._held: list[bytes] = []
        self._num_held = 0
        self._num_unused = 0
        self._take: Take | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._last_read_at = 0.0
        self._ends_with_connection = False
        self._is_whole = False
        self._keeps = False
        self._lost = ""

    # What readers ask ---------------------------------------------------------------------------

    async def wait_for_head(self) -> None:
        """Returns when the head is here. Raises `NodeLost`."""
        while self.is_awaited:
            if self._lost:
                raise NodeLost(self._lost)
            await self._wait()

    async def stream(self, take: Take) -> bool:
        """Gives the body to `take`, as it comes. Returns True when it is complete, False when
        `take` wants no more for now: then `stream` may be called again. Raises `NodeLost`."""
        if self._held:
            held = b"".join(self._held)
            self._held.clear()
            self._num_held = 0
            if self._line is not None:
                self._line.read_on()
            if not take(held):
                return False
        if self._is_whole:
            return True
        if self._lost:
            raise NodeLost(self._lost)
        self._take = take
        try:
            return await self._wait()
        finally:
            self._take = None

    async def read_chunk(self) -> bytes:
        """Returns what has come of the body; b"" at its end. Raises `NodeLost`."""
        got: list[bytes] = []

        def take(data: bytes) -> bool:
            got.append(data)
            return False

        await self.stream(take)
        return got[0] if got else b""

    def close(self) -> None:
        """Hangs up on the node, unless the answer is whole."""
        self._lose("the answer was given up")

    # What the connection tells ------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self._last_read_at = time.monotonic()
        assert self._parser is not None
        fault = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            fault = _NO_HTTP
        came = self._came
        if came:
            self._num_unused = 0
            piece = came[0] if len(came) == 1 else b"".join(came)
            came.clear()
            self._deliver(piece)
        else:
            self._num_unused += len(data)
            if self._num_unused > _MAX_UNUSED_BYTES:
                fault = "it sends what belongs to no answer"
        if self._is_whole:
            self._end(is_kept=self._keeps and not fault)
        elif fault:
            self._lose(fault)

    def connection_ended(self, error: Exception | None) -> None:
        """Is called when the connection is closed in the midst of the answer."""
        if self._ends_with_connection and error is None:
            self._is_whole = True
            self._end(is_kept=False)
        else:
            why = f": {type(error).__name__}: {error}" if error else ""
            self._lose(f"its connection has ended before the answer{why}")

    # What the parser calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Is called for the answer, and for anything behind it, which nothing asked for."""
        if self._is_whole:
            self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_awaited:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if not self.is_awaited:
            return
        if status < 200:
            self.headers.clear()
            return
        names = {name for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        self.status = status
        self.is_awaited = False
        if self._line is not None:
            self._line.head_came()
        self._wake(False)

    def on_body(self, data: bytes) -> None:
        if not self._is_whole:
            self._came.append(data)

    def on_message_complete(self) -> None:
        if not (self._is_whole or self.is_awaited):
            assert self._parser is not None
            self._is_whole = True
            self._keeps = self._parser.should_keep_alive()

    # --------------------------------------------------------------------------------------------

    def _deliver(self, piece: bytes) -> None:
        take = self._take
        if take is not None:
            try:
                if take(piece):
                    return
            except Exception as error:
                self._take = None
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
                return
            self._take = None
            self._wake(False)
            return
        self._held.append(piece)
        self._num_held += len(piece)
        if self._num_held > _MAX_HELD_BYTES and self._line is not None:
            self._line.stop_reading()

    def _end(self, *, is_kept: bool) -> None:
        """Leaves the connection. The parser goes, because it and this object hold each other."""
        line, self._line = self._line, None
        self._parser = None
        if line is not None:
            line.ended(is_kept=is_kept)
        if self._is_whole and self._take is not None:
            self._take = None
            self._wake(True)

    def _lose(self, why: str) -> None:
        if self._line is None:
            return
        self._lost = why
        self._take = None
        self._end(is_kept=False)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(NodeLost(why))

    async def _wait(self) -> bool:
        loop = asyncio.get_running_loop()
        self._last_read_at = time.monotonic()
        self._waiter = loop.create_future()
        timer = loop.call_later(self._read_timeout_s, self._check_silence, loop)
        self._timer = timer
        try:
            return await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = None

    def _wake(self, value: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(value)

    def _check_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        left_s = self._last_read_at + self._read_timeout_s - time.monotonic()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._check_silence, loop)
        else:
            self._lose(f"it has said nothing for {self._read_timeout_s:g} s")
