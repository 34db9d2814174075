"""Answers on the wire: one JSON body, or a stream of server-sent events.

    data: {first chunk}          the status and headers wait for it: what fails before is a real
    data: {next chunk}           HTTP error, not a 200 with bad news inside
    ...
    data: [DONE]                 exactly once and last, and only after a complete answer

    data: {"error": {...}}       instead of [DONE] when the answer breaks off; then the end

A router that keeps a journal also hears how errors are meant, and a heartbeat when an answer has
nothing new for a while (`decode_node.answer.journal`).

A client that reads slowly holds up only itself: its chunks wait in the socket, and after
`send_timeout_s` without progress it is disconnected. When a client hangs up, the work is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decode_node.answer.event import DONE, event
from decode_node.answer.heartbeats import Heartbeats, Pulse
from decode_node.answer.journal import COMPLETE
from decode_node.errors import GenerationFailed, Unavailable
from edge.http.client_connection import ClientDisconnected, ClientGuard
from edge.http.errors import HttpError, send_error

logger = logging.getLogger(__name__)

Headers = Callable[[], Mapping[str, str]]
"""Headers that are asked for when the answer begins: some are known only then."""


class Form(Protocol):
    """The part of a `ResponseFormat` that ends answers."""

    done: bytes

    def error_event(self, error: HttpError) -> bytes: ...
    def error_body(self, error: HttpError) -> bytes: ...


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


class JsonResponse(Response):
    """Answers with the body that `work` makes. Nothing is sent before it is complete."""

    def __init__(self, work: Callable[[], Awaitable[bytes]], form: Form, headers: Headers) -> None:
        super().__init__()
        self._work = work
        self._form = form
        self._late_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            async with ClientGuard(receive):
                await self._answer(send)

    async def _answer(self, send: Send) -> None:
        try:
            body = await self._work()
        except HttpError as error:
            await send_error(send, error, body=self._form.error_body(error))
            return
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send_start(send, 200, {**headers, **self._late_headers()})
        await send({"type": "http.response.body", "body": body})


class EventStreamResponse(Response):
    """Sends `events`, and ends them as their API does, or with an error event."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        form: Form,
        headers: Headers,
        send_timeout_s: float,
    ) -> None:
        super().__init__()
        self._events = events
        self._form = form
        self._late_headers = headers
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            async with ClientGuard(receive):
                await self._answer(send)

    async def _answer(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            try:
                first = await anext(self._events, b"")
            except HttpError as error:
                await send_error(send, error, body=self._form.error_body(error))
                return
            await self._stream(first, send)

    async def _stream(self, first: bytes, send: Send) -> None:
        headers = {"content-type": self.content_type, "cache-control": "no-store"}
        await send_start(send, 200, {**headers, **self._late_headers()})
        try:
            if first:
                await self._send(send, first)
            async for chunk in self._events:
                await self._send(send, chunk)
            last = self._done()
        except HttpError as error:
            last = self._error_event(error)
        except (asyncio.CancelledError, TimeoutError):
            raise
        except Exception:
            logger.exception("an answer broke off")
            last = self._error_event(GenerationFailed("the server failed; see its log"))
        if last:
            await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        """Sends, and raises TimeoutError when the client takes nothing."""
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    def _done(self) -> bytes:
        return self._form.done

    def _error_event(self, error: HttpError) -> bytes:
        return self._form.error_event(error)


class JournaledResponse(EventStreamResponse):
    """Answers a router that keeps a journal. With `is_whole` the client gets the data of the last
    event as a body, in whatever API."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        form: Form,
        headers: Headers,
        send_timeout_s: float,
        heartbeats: Heartbeats,
        *,
        is_whole: bool,
    ) -> None:
        super().__init__(events, form, headers, send_timeout_s)
        if is_whole:
            self.content_type = "application/json"
        self._is_whole = is_whole
        self._heartbeats = heartbeats
        self._pulse: Pulse | None = None

    async def _stream(self, first: bytes, send: Send) -> None:
        with self._heartbeats.watch(send) as self._pulse:
            await super()._stream(first, send)

    async def _send(self, send: Send, data: bytes) -> None:
        assert self._pulse is not None
        with self._pulse.sending():
            await super()._send(send, data)

    def _done(self) -> bytes:
        return DONE if self._is_whole else super()._done() or COMPLETE

    def _error_event(self, error: HttpError) -> bytes:
        kind = b"!" if isinstance(error, Unavailable) else b"x"
        if self._is_whole:
            shown = event(self._form.error_body(error))
        else:
            shown = super()._error_event(error)
        return b":%b %d\n" % (kind, error.status) + shown
