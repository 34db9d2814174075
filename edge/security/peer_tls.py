"""Finds out which peers speak TLS, in the time in which some do not yet.

    1. unknown    a peer is dialled by TLS
    2. asked      a connection of its own, the beginning of a handshake, the first byte of the
                  answer. Nothing else is sent, and nothing that comes is believed: a peer that
                  answers by TLS has yet to show its certificate to its callers
    3. plaintext  it has answered, and not by TLS. A peer that cannot be reached or does not answer
                  is unknown
    4. asked again by the next call after `_FRESH_S`: peers are restarted just now

An attacker between two services can answer in a peer's place, and so make us talk in plaintext:
that is the price of a roll without an outage, and why it is a setting that is turned off after it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass, field

from edge.address import look_up, split_address

_FRESH_S = 1.0
_ANSWER_S = 5.0
_MAX_KNOWN = 1024
_TLS_RECORDS = (b"\x15", b"\x16")
"""Types of the first record of an answer: an alert, a handshake."""


@dataclass(slots=True)
class _Peer:
    is_plaintext: bool = False
    asked_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PeerTls:
    """Knows peers by address, `host:port`."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def speaks_plaintext(self, address: str) -> bool:
        """Returns what the last answer showed."""
        peer = self._peers.get(address)
        return peer is not None and peer.is_plaintext

    async def ask(self, address: str) -> None:
        """Asks the peer, unless it was asked a moment ago."""
        peer = self._peers.get(address)
        if peer is None:
            self._forget_some()
            peer = self._peers[address] = _Peer()
        async with peer.lock:
            if time.monotonic() - peer.asked_at < _FRESH_S:
                return
            try:
                async with asyncio.timeout(_ANSWER_S):
                    first = await _first_byte(address)
            except (OSError, ValueError, TimeoutError):
                first = b""
            peer.is_plaintext = bool(first) and first not in _TLS_RECORDS
            peer.asked_at = time.monotonic()

    def _forget_some(self) -> None:
        """Forgets the oldest address, where callers name ever new ones."""
        if len(self._peers) >= _MAX_KNOWN:
            del self._peers[next(iter(self._peers))]


async def _first_byte(address: str) -> bytes:
    """Returns the first byte of the answer to a handshake; b"" for none. Raises OSError."""
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    infos = await look_up(host, port)
    reason: OSError = OSError("the name has no address")
    for family, kind, protocol, _, target in infos:
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, target)
                await loop.sock_sendall(sock, _hello())
                return await loop.sock_recv(sock, 1)
            except OSError as error:
                reason = error
    raise reason


def _hello() -> bytes:
    """Returns the beginning of a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake needs an answer")
