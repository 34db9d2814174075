"""Reads and writes `host:port`, the same for names, IPv4 and IPv6 (`[::1]:8000`), and asks the
system for the addresses of names."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

_MAX_PORT = 65535
_MOST_LOOKUPS = 256

AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""Is what `socket.getaddrinfo` lists."""
_Question = tuple[asyncio.AbstractEventLoop, str, int | None]
_open: dict[_Question, asyncio.Future[Sequence[AddressInfo]]] = {}


def join_address(host: str, port: int) -> str:
    """Joins host and port. An IPv6 address gets brackets, unless it has them."""
    return f"{bracketed(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Returns host, without brackets, and port. Raises `ValueError`."""
    host, separator, digits = address.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    is_port = digits.isascii() and digits.isdigit() and int(digits) <= _MAX_PORT
    if not (separator and name and is_port) or (":" in name) != host.startswith("["):
        raise ValueError(f"{address!r} is not host:port (IPv6: [address]:port)")
    return name, int(digits)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def look_up(host: str, port: int | None = None) -> Sequence[AddressInfo]:
    """Returns where a name leads, for TCP. Raises `OSError` or `UnicodeError`.

    Event loops have few threads for this, uvloop two, which names whose servers are silent for many
    seconds would keep from all others. So each name has a thread of its own, while it is asked for.
    """
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    question = asyncio.get_running_loop(), host, port
    answer = _open.get(question)
    if answer is None:
        if len(_open) >= _MOST_LOOKUPS:
            raise OSError(f"{_MOST_LOOKUPS} other names are asked for, and none has an answer yet")
        answer = _open[question] = question[0].create_future()
        answer.add_done_callback(lambda known: known.exception())  # All who ask may have left.
        name = f"address of {host}"
        asking = threading.Thread(target=_ask, args=(question, answer), daemon=True, name=name)
        try:
            asking.start()
        except RuntimeError as error:  # The process may have no more threads.
            del _open[question], answer
            raise OSError(f"{host} cannot be asked for now: {error}") from None
    try:
        return await asyncio.shield(answer)
    finally:
        del answer  # Else a fault would have a frame that has the fault.


def _ask(question: _Question, answer: asyncio.Future[Sequence[AddressInfo]]) -> None:
    loop, host, port = question
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        settle = partial(_settle, answer, found, None)
    except Exception as error:
        settle = partial(_settle, answer, [], error.with_traceback(None))
    del _open[question], answer
    with contextlib.suppress(RuntimeError):  # The loop has ended.
        loop.call_soon_threadsafe(settle)


def _settle(
    answer: asyncio.Future[Sequence[AddressInfo]],
    found: Sequence[AddressInfo],
    fault: Exception | None,
) -> None:
    if fault is None:
        answer.set_result(found)
    else:
        answer.set_exception(fault)


def is_loopback(host: str) -> bool:
    """Returns whether nothing but this host can be there. Names other than localhost are not asked
    for."""
    name = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False
