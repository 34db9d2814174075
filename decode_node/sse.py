"""Answers on the wire: one JSON body, or a stream of server-sent events.

    data: {first chunk}          the status and headers wait for it: what fails before is a real
    data: {next chunk}           HTTP error, not a 200 with bad news inside
    ...
    data: [DONE]                 exactly once and last, and only after a complete answer

    data: {"error": {...}}       instead of [DONE] when the answer breaks off; then the end

A client that reads slowly holds up only itself: its chunks wait in the socket, and after
`send_timeout_s` without progress it is disconnected. When a client hangs up, the work is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decode_node.client_connection import ClientDisconnected, run_while_connected
from decode_node.errors import ApiError, GenerationFailed

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

Headers = Callable[[], Mapping[str, str]]
"""Asked when the answer begins: some are known only then."""


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, which has no line breaks."""
    return b"data: " + data + b"\n\n"


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_error(send: Send, error: ApiError) -> None:
    """A complete response."""
    body = error.body()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    await send_start(send, error.status, {**headers, **error.headers()})
    await send({"type": "http.response.body", "body": body})


class JsonResponse(Response):
    """`work` makes the body. Nothing is sent before it is complete."""

    def __init__(self, work: Callable[[], Awaitable[bytes]], headers: Headers) -> None:
        super().__init__()
        self._work = work
        self._late_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await run_while_connected(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        try:
            body = await self._work()
        except ApiError as error:
            await send_error(send, error)
            return
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send_start(send, 200, {**headers, **self._late_headers()})
        await send({"type": "http.response.body", "body": body})


class EventStreamResponse(Response):
    """`chunks` are JSON bodies; ends them with `[DONE]`, or with an error event."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], headers: Headers, send_timeout_s: float
    ) -> None:
        super().__init__()
        self._chunks = chunks
        self._late_headers = headers
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await run_while_connected(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            try:
                first = await anext(self._chunks)
            except ApiError as error:
                await send_error(send, error)
                return
            await self._stream(first, send)

    async def _stream(self, first: bytes, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        await send_start(send, 200, {**headers, **self._late_headers()})
        await self._send(send, event(first))
        try:
            async for chunk in self._chunks:
                await self._send(send, event(chunk))
            last = DONE
        except ApiError as error:
            last = event(error.body())
        except (asyncio.CancelledError, TimeoutError):
            raise
        except Exception:
            logger.exception("an answer broke off")
            last = event(GenerationFailed("the server failed; see its log").body())
        await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        """Raises TimeoutError: the client takes nothing."""
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
