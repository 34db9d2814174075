"""The client's side of one request: its body, its headers, and whether it is still there."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope

from router.errors import BadRequest, BodyTooLarge, RequestTimeout, UnsupportedEncoding

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ClientDisconnected(Exception):
    """The client hung up; there is nobody left to answer."""


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
        self._watcher.cancel()
        if self._disconnected and self._task.uncancel() == 0:
            raise ClientDisconnected from exc

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._task.cancel()


def request_headers(scope: Scope) -> Mapping[str, str]:
    """Names in lower case; of a repeated header the first."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id if it is a plain one, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def read_body(
    headers: Mapping[str, str], receive: Receive, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: by its declared length, before anything is read, or by what arrived.
        RequestTimeout: it did not arrive in time.
        UnsupportedEncoding: it is compressed.
        ClientDisconnected: the client left while sending it.
    """
    _check_headers(headers, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_body(receive, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The request body did not arrive within {timeout_s:g} s.") from None


def _check_headers(headers: Mapping[str, str], max_bytes: int) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding("Compressed request bodies are not supported.")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise BadRequest("The Content-Length header is not a number.")
    if len(length) > 18 or int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _receive_body(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes.")
