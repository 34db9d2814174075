"""Says how a listener serves TLS, and tells TLS from plaintext while both are accepted.

1. accepted   nothing is known but the address. `begins_with_tls` waits for the first byte, and
              leaves it where it is
2. TLS        it is that of a handshake, which neither HTTP/1.1 nor HTTP/2 begins with
   plaintext  it is another one: counted, and served as if there were no TLS
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

_HANDSHAKE = b"\x16"
"""Type of the first record of a TLS connection (RFC 8446, section 5.1)."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Holds the TLS of one listener. With `count_plaintext` clients without TLS are served as
    well, once that was called."""

    context: ssl.SSLContext
    count_plaintext: Callable[[], None] | None = None


async def begins_with_tls(sock: socket.socket) -> bool:
    """Waits for the first byte of a connection that does not block, and says whether it begins
    TLS. Raises OSError when the peer leaves without one. The time is for callers to bound."""
    while True:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            await _readable(sock)
            continue
        if not first:
            raise ConnectionAbortedError("the peer has left without a word")
        return first == _HANDSHAKE


async def _readable(sock: socket.socket) -> None:
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), called.set)
    try:
        await called.wait()
    finally:
        loop.remove_reader(sock.fileno())
