"""Handles the client's side of a request: its headers, its body, and whether it is still there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope

from edge.http.bodies.body_room import BodyLease, BodyRoom
from edge.http.bodies.json_counter import JsonCounter
from edge.http.errors import BadRequest, RequestTimeout, RequestTooLarge, UnsupportedBody
from edge.http.event_loop.long_work import pause
from edge.http.headers import media_type
from edge.http.request_head import RequestHead
from edge.tracing.context import plain_request_id

LEAST_ROOM = 8 << 20
"""Bytes of bodies that arrive at once, besides those of one that goes on when there is no room."""
GONE = "gone"
"""The key under which each request's state holds a future, done when its connection has ended."""
_LENGTH_DIGITS = 18


class ClientDisconnected(Exception):
    """The client hung up; there is nothing left to answer."""


class ClientGuard:
    """Cancels the task inside `async with` when the client hangs up, and then raises
    `ClientDisconnected` in its place. To be entered once the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, watcher = self._task, self._watcher
        # A task that ends with an error holds its frames, which hold this.
        del self._task, self._watcher
        watcher.cancel()
        if self._disconnected and task.uncancel() == 0:
            raise ClientDisconnected from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        await pause(is_begun=True)  # Thousands leave at once where a balancer before us ends.
        self._disconnected = True
        self._task.cancel()


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds a body. `timeout_s` is the time from the head of the request to the end of its
    body; `room` is for all bodies together."""

    max_bytes: int
    timeout_s: float
    room: BodyRoom = field(default_factory=lambda: BodyRoom(LEAST_ROOM))


def lease_of(scope: Scope, limits: BodyLimits) -> BodyLease:
    """Returns what a request needs to have its body read."""
    return limits.room.lease(scope["state"].get(GONE))


def request_headers(scope: Scope) -> Mapping[str, str]:
    """Returns the headers, names in lower case; of a repeated header the first."""
    return headers_of(scope["headers"])


def head_of(scope: Scope) -> RequestHead:
    """Returns the head of a request whose connection is not known."""
    return RequestHead(method=scope["method"], path=scope["path"], headers=request_headers(scope))


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Returns the same, of headers as they arrive."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def request_id(headers: Mapping[str, str]) -> str:
    """Returns the client's id if it is a plain one, else a new one."""
    return plain_request_id(headers) or uuid.uuid4().hex


async def read_json_body(
    headers: Mapping[str, str],
    receive: Receive,
    limits: BodyLimits,
    lease: BodyLease,
    num_json_bytes: int | None = None,
) -> bytes:
    """Returns the whole body. Its JSON, the first `num_json_bytes` or all, is counted as it comes.
    `lease` is of the room of `limits`, to be kept until the body was understood.

    Raises:
        BadRequest: The JSON holds more than may be parsed (`edge.http.bodies.json_counter`).
        RequestTooLarge: By its declared length, before anything is read, or by what arrived.
        RequestTimeout: It did not arrive in time.
        UnsupportedBody: It is compressed, or does not say that it is JSON: what a form, or a page
            of another site, can send without asking does not.
        ClientDisconnected: The client left while sending it.
    """
    lease.expect(_checked_length(headers, limits.max_bytes))
    try:
        async with asyncio.timeout(limits.timeout_s) as clock:
            body = _Body(limits.max_bytes, num_json_bytes)
            while True:
                await lease.wait(clock)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                part = message.get("body", b"")
                body.add(part)
                lease.take(len(part))
                if not message.get("more_body", False):
                    return body.whole()
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {limits.timeout_s:g} s, or came slowly while "
            f"others waited"
        ) from None


def _checked_length(headers: Mapping[str, str], max_bytes: int) -> int:
    """Returns the length that a body says it has; 0 where it does not. Raises `HttpError`."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedBody(
            "compressed request bodies are not taken", code="unsupported_content_encoding"
        )
    kind = media_type(headers)
    if kind != "application/json" and not (
        kind.startswith("application/") and kind[-5:] == "+json"
    ):
        said = f"Content-Type {kind!r}" if kind else "no Content-Type"
        raise UnsupportedBody(
            f"the request has {said}; send 'Content-Type: application/json' (curl: -H "
            f"'content-type: application/json')"
        )
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise BadRequest("the Content-Length header is not a number")
    if len(length) > _LENGTH_DIGITS or int(length) > max_bytes:
        raise _too_large(max_bytes)
    return int(length)


class _Body:
    """Collects a body, in one place that grows: at its end nothing is copied. Raises `BadRequest`,
    `RequestTooLarge` as soon as it is too much."""

    def __init__(self, max_bytes: int, num_json_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._num_json_bytes = num_json_bytes
        self._counter = JsonCounter()
        self._size = 0
        self._bytes = BytesIO()

    def add(self, part: bytes) -> None:
        if self._size + len(part) > self._max_bytes:
            raise _too_large(self._max_bytes)
        left = None if self._num_json_bytes is None else max(0, self._num_json_bytes - self._size)
        self._counter.feed(part[:left])
        self._size += len(part)
        self._bytes.write(part)

    def whole(self) -> bytes:
        return self._bytes.getvalue()


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes")
