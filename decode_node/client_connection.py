"""The client's side of one HTTP request: its headers, its body, and whether it is still there."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Scope

from decode_node.errors import BadRequest, RequestTimeout, RequestTooLarge, UnsupportedEncoding

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PREFIX_HASH = re.compile("[0-9a-f]{16}")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")
_MAX_PREFILL_NODES = 16


class ClientDisconnected(Exception):
    """The client hung up; nobody is left to answer."""


def request_headers(scope: Scope) -> Mapping[str, str]:
    """Names in lower case; of a repeated header the first."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def prefix_hash(text: str) -> int:
    """From its 16 hex digits; 0 for anything else."""
    return int(text, 16) if _PREFIX_HASH.fullmatch(text) else 0


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id if it is a plain one, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def prefill_nodes(text: str) -> list[str]:
    """`host:port` of each, best first. Raises `BadRequest`."""
    nodes = [part.strip() for part in text.split(",") if part.strip()]
    for node in nodes:
        if not _HOST_PORT.fullmatch(node):
            raise BadRequest(
                "x-prefiller-host-port must be host:port, comma separated",
                param="x-prefiller-host-port",
            )
    return nodes[:_MAX_PREFILL_NODES]


async def read_body(
    headers: Mapping[str, str], receive: Receive, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body.

    Raises:
        RequestTooLarge: By its declared length, before anything is read, or by what arrived.
        RequestTimeout: It did not arrive in time.
        UnsupportedEncoding: It is compressed.
        ClientDisconnected: The client left while sending it.
    """
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding("compressed request bodies are not taken")
    declared = headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_body(receive, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {timeout_s:g} s") from None


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


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is larger than this server's {max_bytes} bytes")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it and raises `ClientDisconnected` when the client
    hangs up first. Only after the body was read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = task.done()
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not is_done:
        raise ClientDisconnected
    task.result()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
