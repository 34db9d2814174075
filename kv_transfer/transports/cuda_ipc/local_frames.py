"""Calls between two transfer processes of one host, as bytes on a local stream socket.

    puller                              holder of the KV
    CALL     key, then PullRequest ───▶
                                   ◀─── MESSAGE   of a PullKV stream, as everywhere
                                   ◀─── END       status and why, as gRPC has it
    PONG                           ◀──▶ PING      where nothing was received for long

    frame    0   bytes that follow the head      4   kind

One call at a time; the next one may follow on the same connection. A holder of the key was given
it in a handshake over the network, where services authenticate each other, and both ends look at
the user that the kernel says is on the other one. What cannot be read ends the connection.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum

import grpc
import msgspec

HEAD = struct.Struct("<IB")
KEY_BYTES = 32
MAX_REQUEST_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 16 << 20
_NAMES = "tandem-kv-"
_CREDENTIALS = struct.Struct("3i")
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class FrameError(Exception):
    """The peer sent what nothing of ours sends."""


class LocalFrame(IntEnum):
    CALL = 1
    MESSAGE = 2
    END = 3
    PING = 4
    PONG = 5


_KINDS = frozenset(map(int, LocalFrame))


class LocalAddress(msgspec.Struct, frozen=True, array_like=True):
    """Names the abstract socket on which a transfer process, `pid`, takes local calls; `key` lets a
    caller in."""

    pid: int
    name: str
    key: bytes

    @classmethod
    def new(cls) -> LocalAddress:
        """Returns an address of this process that nothing can guess."""
        name = _NAMES + secrets.token_hex(16)
        return cls(os.getpid(), name, secrets.token_bytes(KEY_BYTES))

    @property
    def is_ours(self) -> bool:
        """Returns whether transfer processes have such addresses, whichever peer says that this is
        one."""
        return self.name.startswith(_NAMES) and len(self.key) == KEY_BYTES

    @property
    def path(self) -> str:
        return "\0" + self.name


def frame(kind: LocalFrame, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload), kind) + payload


def end_payload(code: grpc.StatusCode, details: str) -> bytes:
    number: int = code.value[0]
    return bytes([number]) + details.encode()


def parse_end(payload: bytes) -> tuple[grpc.StatusCode, str]:
    code = _STATUS_CODES.get(payload[0] if payload else -1, grpc.StatusCode.UNKNOWN)
    return code, payload[1:].decode(errors="replace")


class FrameReader:
    """Cuts what arrives into frames of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[LocalFrame, bytes]]:
        """Yields what is complete. Raises `FrameError` for what cannot be a frame, before it takes
        memory for it."""
        self._received += data
        while len(self._received) >= HEAD.size:
            size, kind = HEAD.unpack_from(self._received)
            if size > self._max_bytes:
                raise FrameError(f"a frame of {size} bytes")
            if kind not in _KINDS:
                raise FrameError(f"a frame of kind {kind}")
            stop = HEAD.size + size
            if len(self._received) < stop:
                return
            payload = bytes(self._received[HEAD.size : stop])
            del self._received[:stop]
            yield LocalFrame(kind), payload


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Returns (pid, user) of the process at the other end: of the one that listened, or connected.
    The kernel says so."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user
