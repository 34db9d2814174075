"""The few words of HTTP/2 that a gRPC call which only receives has to speak.

Frames (RFC 9113) are built here and header blocks (HPACK, RFC 7541) are read here. We tell the
server that our header table is empty, so blocks hold literals and the static table only.
"""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
MAX_FRAME_BYTES = (1 << 24) - 1
MAX_WINDOW = (1 << 31) - 1
_SERVER_FRAME_BYTES = 1 << 14
"""What every server takes."""

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20


class FrameKind(IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class H2Error(Exception):
    """The server speaks HTTP/2 in a way that is not understood here."""


def frame(kind: FrameKind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream) + payload


def parse_frame_header(data: memoryview) -> tuple[int, int, int, int]:
    """(payload bytes, kind, flags, stream)."""
    length_and_kind, flags, stream = struct.unpack_from(">IBI", data)
    return length_and_kind >> 8, length_and_kind & 0xFF, flags, stream & MAX_WINDOW


def opening() -> bytes:
    """First words of a connection: no header table, no push, windows and frames as large as can
    be. A connection carries one call at a time, so TCP alone holds the sender back."""
    settings = ((0x1, 0), (0x2, 0), (0x4, MAX_WINDOW), (0x5, MAX_FRAME_BYTES))
    payload = b"".join(struct.pack(">HI", key, value) for key, value in settings)
    grow = MAX_WINDOW - 65_535
    return PREFACE + frame(FrameKind.SETTINGS, 0, 0, payload) + window_update(0, grow)


def window_update(stream: int, num_bytes: int) -> bytes:
    return frame(FrameKind.WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes))


def request(stream: int, path: str, authority: str, message: bytes) -> bytes:
    """A whole gRPC request with one message."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "tandem"),
    )
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)
    body = struct.pack(">BI", 0, len(message)) + message
    pieces = [body[i : i + _SERVER_FRAME_BYTES] for i in range(0, len(body), _SERVER_FRAME_BYTES)]
    return b"".join(
        (
            frame(FrameKind.HEADERS, END_HEADERS, stream, block),
            *(frame(FrameKind.DATA, 0, stream, piece) for piece in pieces[:-1]),
            frame(FrameKind.DATA, END_STREAM, stream, pieces[-1]),
        )
    )


def without_padding(payload: bytes, flags: int) -> bytes:
    """The header block of a HEADERS frame."""
    start, padding = 0, 0
    if flags & PADDED:
        start, padding = 1, payload[0] if payload else 0
    if flags & PRIORITY:
        start += 5
    if start + padding > len(payload):
        raise H2Error("a HEADERS frame is shorter than its padding")
    return payload[start : len(payload) - padding]


def parse_headers(block: bytes) -> dict[str, str]:
    """Raises `H2Error`. Of indexed fields only `:status` is told; Huffman-coded strings, which
    gRPC servers do not send unless a proxy rewrites them, are told as empty."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            index, at = _integer(block, at, 7)
            fields.update(_STATIC_STATUS.get(index, {}))
            continue
        if first & 0xE0 == 0x20:
            _, at = _integer(block, at, 5)
            continue
        index, at = _integer(block, at, 6 if first & 0x40 else 4)
        if index == 0:
            name, at = _read_string(block, at)
        else:
            name = ":status" if index in _STATIC_STATUS else ""
        value, at = _read_string(block, at)
        fields[name] = value
    return fields


_STATIC_STATUS = {
    8 + i: {":status": status}
    for i, status in enumerate(("200", "204", "206", "304", "400", "404", "500"))
}


def _string(text: str) -> bytes:
    data = text.encode()
    return _encode_integer(len(data)) + data


def _encode_integer(value: int) -> bytes:
    """With a 7-bit prefix whose flag is clear."""
    if value < 0x7F:
        return bytes([value])
    value -= 0x7F
    parts = [0x7F]
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """(value, where it ends)."""
    limit = (1 << prefix_bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    for shift in range(0, 28, 7):
        if at >= len(block):
            break
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise H2Error("a number in a header block does not end")


def _read_string(block: bytes, at: int) -> tuple[str, int]:
    if at >= len(block):
        raise H2Error("a header block stops in the middle")
    is_huffman = bool(block[at] & 0x80)
    length, at = _integer(block, at, 7)
    if at + length > len(block):
        raise H2Error("a header block stops in the middle of a string")
    text = "" if is_huffman else block[at : at + length].decode("latin-1")
    return text, at + length
