"""The words of HTTP/2 that gRPC calls need, on both ends.

Frames (RFC 9113) are built and read here. Header blocks are written as plain literals, which
every peer reads, and read with the hpack library (RFC 7541).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from enum import IntEnum
from urllib.parse import quote

from hpack import Decoder, HPACKError

logging.getLogger("hpack").setLevel(logging.INFO)
"""Below that it writes what every header says, and some say the cluster's token."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
MAX_FRAME_BYTES = (1 << 24) - 1
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = (1 << 16) - 1
DEFAULT_FRAME_BYTES = 1 << 14
"""Every peer takes these."""
MAX_HEADER_BYTES = 16 << 10
"""A call has at most this many, as they come and when they are unpacked."""
_MAX_PIECES = 256
"""CONTINUATION frames of one header block."""

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20


class FrameKind(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class H2Error(Exception):
    """The peer speaks HTTP/2 in a way that is wrong, or not understood here."""

    def __init__(self, reason: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.code = code


def frame_header(num_bytes: int, kind: FrameKind, flags: int, stream: int) -> bytes:
    return struct.pack(">IBI", num_bytes << 8 | kind, flags, stream)


def frame(kind: FrameKind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frame_header(len(payload), kind, flags, stream) + payload


def parse_frame_header(data: memoryview | bytearray) -> tuple[int, int, int, int]:
    """Returns (payload bytes, kind, flags, stream)."""
    length_and_kind, flags, stream = struct.unpack_from(">IBI", data)
    return length_and_kind >> 8, length_and_kind & 0xFF, flags, stream & MAX_WINDOW


def settings_frame(settings: dict[Setting, int]) -> bytes:
    payload = b"".join(struct.pack(">HI", key, value) for key, value in settings.items())
    return frame(FrameKind.SETTINGS, 0, 0, payload)


def parse_settings(payload: bytes) -> Iterable[tuple[int, int]]:
    """Yields (setting, value). Unknown ones are yielded too."""
    if len(payload) % 6:
        raise H2Error("SETTINGS of a wrong size", ErrorCode.FRAME_SIZE_ERROR)
    return struct.iter_unpack(">HI", payload)


def window_update(stream: int, num_bytes: int) -> bytes:
    return frame(FrameKind.WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes))


def parse_window_update(payload: bytes) -> int:
    if len(payload) != 4:
        raise H2Error("WINDOW_UPDATE of a wrong size", ErrorCode.FRAME_SIZE_ERROR)
    increment = int.from_bytes(payload) & MAX_WINDOW
    if increment == 0:
        raise H2Error("WINDOW_UPDATE by nothing")
    return increment


def reset(stream: int, code: ErrorCode) -> bytes:
    return frame(FrameKind.RST_STREAM, 0, stream, struct.pack(">I", code))


def go_away(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    return frame(FrameKind.GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + reason.encode())


def client_opening() -> bytes:
    """Returns the first words of a puller: no header table, no push, windows and frames as large as
    can be. A connection carries one call at a time, so TCP alone holds the sender back."""
    settings = {
        Setting.HEADER_TABLE_SIZE: 0,
        Setting.ENABLE_PUSH: 0,
        Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW,
        Setting.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
    }
    return PREFACE + settings_frame(settings) + window_update(0, MAX_WINDOW - DEFAULT_WINDOW)


def headers(stream: int, fields: Iterable[tuple[str, str]], flags: int = 0) -> bytes:
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)
    return frame(FrameKind.HEADERS, END_HEADERS | flags, stream, block)


def request(
    stream: int,
    path: str,
    authority: str,
    message: bytes,
    metadata: Iterable[tuple[str, str]] = (),
) -> bytes:
    """Returns a whole gRPC request with one message."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "tandem"),
        *metadata,
    )
    body = struct.pack(">BI", 0, len(message)) + message
    pieces = [body[i : i + DEFAULT_FRAME_BYTES] for i in range(0, len(body), DEFAULT_FRAME_BYTES)]
    return b"".join(
        (
            headers(stream, fields),
            *(frame(FrameKind.DATA, 0, stream, piece) for piece in pieces[:-1]),
            frame(FrameKind.DATA, END_STREAM, stream, pieces[-1]),
        )
    )


RESPONSE_FIELDS = ((":status", "200"), ("content-type", "application/grpc"))


def trailers(stream: int, status: int, details: str, *, is_first: bool) -> bytes:
    """Returns the end of an answer. `is_first`: nothing was answered before."""
    fields = [("grpc-status", str(status))]
    if details:
        fields.append(("grpc-message", quote(details, safe=" !#$&'()*+,/:;=?@[]~")))
    return headers(stream, [*(RESPONSE_FIELDS if is_first else ()), *fields], END_STREAM)


def without_padding(payload: bytes, flags: int) -> bytes:
    """Returns what a HEADERS or DATA frame carries."""
    start, padding = 0, 0
    if flags & PADDED:
        start, padding = 1, payload[0] if payload else 0
    if flags & PRIORITY:
        start += 5
    if start + padding > len(payload):
        raise H2Error("a frame is shorter than its padding")
    return payload[start : len(payload) - padding]


class HeaderReader:
    """Header blocks of one connection, from HEADERS and CONTINUATION frames."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_HEADER_BYTES)
        self._block = b""
        self._num_pieces = 0
        self._flags = 0
        self._stream = 0

    @property
    def is_waiting(self) -> bool:
        """Returns whether a block is incomplete: nothing but CONTINUATION may come."""
        return self._stream > 0

    def begin(self, stream: int, flags: int, payload: bytes) -> tuple[dict[str, str], bool] | None:
        """Reads HEADERS. Returns (fields, whether the stream ends) of a complete block."""
        self._stream, self._flags = stream, flags
        self._block = without_padding(payload, flags)
        self._num_pieces = 0
        return self._end(flags)

    def go_on(self, stream: int, flags: int, payload: bytes) -> tuple[dict[str, str], bool] | None:
        """Reads CONTINUATION."""
        if stream != self._stream:
            raise H2Error("CONTINUATION without a beginning")
        self._num_pieces += 1
        if self._num_pieces > _MAX_PIECES:
            raise H2Error("a header block in too many pieces", ErrorCode.ENHANCE_YOUR_CALM)
        self._block += payload
        return self._end(flags)

    def _end(self, flags: int) -> tuple[dict[str, str], bool] | None:
        if len(self._block) > MAX_HEADER_BYTES:
            raise H2Error("a header block is too long", ErrorCode.ENHANCE_YOUR_CALM)
        if not flags & END_HEADERS:
            return None
        try:
            fields = {
                bytes(name).decode("latin-1"): bytes(value).decode("latin-1")
                for name, value in self._decoder.decode(self._block, raw=True)
            }
        except HPACKError as error:
            raise H2Error(f"headers: {error}", ErrorCode.COMPRESSION_ERROR) from error
        self._stream, self._block = 0, b""
        return fields, bool(self._flags & END_STREAM)


def _string(text: str) -> bytes:
    data = text.encode()
    return _encode_integer(len(data)) + data


def _encode_integer(value: int) -> bytes:
    """Encodes it with a 7-bit prefix whose flag is clear."""
    if value < 0x7F:
        return bytes([value])
    value -= 0x7F
    parts = [0x7F]
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
