"""Answers on the wire: one JSON body, or a stream of server-sent events.

    : keep-alive                 after each `--sse-keepalive-s` without anything, also before:

    data: {first chunk}          the status and headers wait for it: what fails before is a real
    data: {next chunk}           HTTP error, not a 200 with bad news inside, unless a keep-alive
    ...                          has come first
    data: [DONE]                 exactly once and last, and only after a complete answer

    data: {"error": {...}}       instead of [DONE] when the answer breaks off; then the end

A router that keeps a journal also learns how errors are meant, and a heartbeat each second when an
answer that has begun has nothing new (`decode_node.answer.journal`). Before, it receives nothing:
from the head it learns what was computed where, and without one it tries another node.

A client that reads slowly holds up only itself (`edge.http.answers.event_writer`): after
`send_timeout_s` without progress it is disconnected. When a client hangs up, the work is cancelled.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decode_node.answer.answer import Write
from decode_node.answer.event import DONE, event
from decode_node.answer.journal import COMPLETE, HEARTBEAT
from decode_node.errors import GenerationFailed, Unavailable
from edge.http.answers.event_writer import Signs, WriteDirectly, open_writer
from edge.http.answers.heartbeats import EVENT_STREAM, STREAM_HEADERS, Heartbeats, send_start
from edge.http.connection.answer_transport import WRITE_DIRECTLY
from edge.http.connection.client_connection import ClientDisconnected, ClientGuard
from edge.http.errors import HttpError, send_error

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0

Headers = Callable[[], Mapping[str, str]]
"""Headers that are asked for when the answer begins: some are known only then."""


class Form(Protocol):
    """The part of a `ResponseFormat` that ends answers."""

    done: bytes

    def error_event(self, error: HttpError) -> bytes: ...
    def error_body(self, error: HttpError) -> bytes: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Says how answers show that they live. A client that takes nothing for `send_timeout_s` is
    disconnected; `keepalive_s` is the longest silence of a stream, in seconds; 0: any."""

    heartbeats: Heartbeats
    send_timeout_s: float
    keepalive_s: float = 0.0

    def with_keepalives(self, is_on: bool) -> Liveness:
        return self if is_on else replace(self, keepalive_s=0.0)


class EventStreamResponse(Response):
    """Sends the events that `work` writes, and ends them as their API does, or with an error
    event."""

    def __init__(
        self,
        work: Callable[[Write], Awaitable[None]],
        form: Form,
        headers: Headers,
        liveness: Liveness,
    ) -> None:
        super().__init__()
        self._work = work
        self._form = form
        self._late_headers = headers
        self._liveness = liveness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            async with ClientGuard(receive):
                await self._answer(send, scope.get("state", {}).get(WRITE_DIRECTLY))

    async def _answer(self, send: Send, write_directly: WriteDirectly | None) -> None:
        live = self._liveness
        async with open_writer(
            send, self._head, live.send_timeout_s, self._signs(), write_directly
        ) as writer:
            with live.heartbeats.watch(writer):
                try:
                    await self._work(writer.write)
                    last = self._done()
                except Exception as error:
                    if not writer.has_begun:
                        refusal = error
                        writer.close()
                    else:
                        await writer.end(self._error_event(_shown_error(error)))
                        return
                else:
                    await writer.end(last)
                    return
        try:
            if not isinstance(refusal, HttpError):
                raise refusal
            await send_error(send, refusal, body=self._form.error_body(refusal))
        finally:
            del refusal  # It holds this frame, which must not hold it.

    def _signs(self) -> Signs:
        return Signs(self._liveness.keepalive_s, head=STREAM_HEADERS)

    def _head(self) -> dict[str, str]:
        return {**STREAM_HEADERS, **self._late_headers()}

    def _done(self) -> bytes:
        return self._form.done

    def _error_event(self, error: HttpError) -> bytes:
        return self._form.error_event(error)


class JournaledResponse(EventStreamResponse):
    """Answers a router that keeps a journal. With `is_whole` the client gets the data of the last
    event as a body, in whatever API."""

    def __init__(
        self,
        work: Callable[[Write], Awaitable[None]],
        form: Form,
        headers: Headers,
        liveness: Liveness,
        *,
        is_whole: bool,
    ) -> None:
        super().__init__(work, form, headers, liveness)
        self._is_whole = is_whole

    def _signs(self) -> Signs:
        return Signs(_HEARTBEAT_S, HEARTBEAT)

    def _head(self) -> dict[str, str]:
        kind = "application/json" if self._is_whole else EVENT_STREAM
        return {**super()._head(), "content-type": kind}

    def _done(self) -> bytes:
        return DONE if self._is_whole else super()._done() or COMPLETE

    def _error_event(self, error: HttpError) -> bytes:
        kind = b"!" if isinstance(error, Unavailable) else b"x"
        if self._is_whole:
            shown = event(self._form.error_body(error))
        else:
            shown = super()._error_event(error)
        return b":%b %d\n" % (kind, error.status) + shown


def _shown_error(error: Exception) -> HttpError:
    """Returns what the client reads of an error that ends its stream."""
    if isinstance(error, HttpError):
        return error
    logger.exception("an answer broke off")
    return GenerationFailed("the server failed; see its log")
