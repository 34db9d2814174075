"""Ends answers that a stopping server has no more time for, in words that clients understand.

A server that stops cancels the tasks of the requests that are still open when the time for them is
over. What the client gets depends on how far its answer is:

- nothing was sent     503 with Retry-After, in the form of the API that was asked
- a stream of events   an event with the error, as wherever a stream breaks off
- anything else        the connection ends amid the answer, so that no part is taken for the whole.
                       So does a stream that a router has asked for with a journal: it goes on with
                       another node
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.http import headers as names
from edge.http.connection.client_connection import request_headers
from edge.http.error_forms import ErrorForm
from edge.http.errors import Stopping, send_error

_SEND_TIMEOUT_S = 1.0
_EVENTS = b"text/event-stream"


class StoppedAnswers:
    """Wraps an ASGI application. Cancellation goes on to the caller, behind the final message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if _is_cancelled():
                await answer.end(scope)
            raise


class QuietEnd:
    """Wraps the application of a server whose tasks are each one request's: a cancelled one ends
    like any other, without a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or not _is_cancelled():
                raise


class _Answer:
    """Knows how far one answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._is_stream = False
        self._is_over = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(_EVENTS)
        else:
            self._is_over = not message.get("more_body", False)
        await self._send(message)

    async def end(self, scope: Scope) -> None:
        form = ErrorForm.of_path(scope["path"])
        error = Stopping("this server is stopping and has ended the request; send it again")
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                if not self._has_begun:
                    await send_error(self._send, error, body=form.body(error))
                elif self._is_stream and not self._is_over and not _goes_on_elsewhere(scope):
                    event = form.event(form.body(error))
                    await self._send({"type": "http.response.body", "body": event})
        except TimeoutError:
            return  # The client does not read.


def _is_cancelled() -> bool:
    """Returns whether the request's own task is cancelled, and not one that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _goes_on_elsewhere(scope: Scope) -> bool:
    return names.JOURNAL in request_headers(scope)
