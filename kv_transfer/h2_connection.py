"""A connection that makes gRPC calls which receive streams of large messages, cheaply.

grpcio hands every message over after three copies under Python's lock. Here the kernel writes a
message's bytes straight into one buffer, which the taker reads in place: two thirds of the
receiver's CPU and 1.2 times the rate or better (`bench/kv_transfer.py` measures both). On the wire
it is gRPC; the server is grpcio's.

    1. `connect` opens the connection; settings are exchanged while the first call is on its way
    2. `call` sends a request and gives every message to `take`, until the trailers have come
    3. one call at a time; a call that is cancelled takes its connection with it
    4. `close`

How bytes become messages:

    |frame header 9|prefix 5|message ......|frame header|.... message|prefix| message ...
     ^ into `_scratch`, 64 KiB at most      ^ large rests of a message go straight into `_message`
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

import grpc
import numpy as np

from kv_transfer import h2_frames as h2
from kv_transfer.errors import PeerLost
from kv_transfer.wire import ByteArray

_SCRATCH_BYTES = 64 << 10
_DIRECT_BYTES = 16 << 10
"""Rests of a message from this size on are received in place."""
_MAX_MESSAGE_BYTES = 128 << 20
_WINDOW_UPDATE_BYTES = 64 << 20
_MAX_STREAM = 1 << 30
_PREFIX = struct.Struct(">BI")

_STATUS_CODES = {str(code.value[0]): code for code in grpc.StatusCode}


class CallRefused(Exception):
    """The server ended the call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class H2Connection(asyncio.BufferedProtocol):
    """`take` gets a view that is valid only until it returns."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.used_at = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self._stream = -1
        self._done: asyncio.Future[None] | None = None
        self._take: Callable[[ByteArray], None] | None = None
        self._fields: dict[str, str] = {}
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._parsed = 0
        self._filled = 0
        """`_scratch[_parsed:_filled]` is received and not looked at yet."""
        self._header_block = b""
        self._header_flags = 0
        self._in_data = False
        self._frame_left = 0
        """Bytes of the DATA frame that are still to come."""
        self._prefix = bytearray()
        self._message = np.empty(0, np.uint8)
        self._message_bytes = 0
        self._message_filled = 0
        self._is_direct = False
        self._unacknowledged = 0

    @classmethod
    async def connect(cls, address: str) -> H2Connection:
        """Raises `PeerLost`."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: cls(address), host.strip("[]"), int(port)
            )
        except OSError as error:
            raise PeerLost(f"{address}: {error}") from error
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether another call may be made."""
        return not self._is_closed and self._done is None and self._stream < _MAX_STREAM

    async def call(self, path: str, message: bytes, take: Callable[[ByteArray], None]) -> None:
        """Returns after a complete stream.

        Raises:
            CallRefused: The server's status says no.
            PeerLost: The connection broke.
            Exception: Whatever `take` raised.
        """
        assert self._transport is not None and self.is_usable
        self._stream += 2
        self._take = take
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(h2.request(self._stream, path, self.address, message))
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = None
            self._take = None
            self.used_at = time.monotonic()

    def close(self) -> None:
        """At once. A call in motion fails. Idempotent."""
        self._fail(PeerLost(f"the connection to {self.address} was given up"))

    # What asyncio calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(h2.opening())

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(PeerLost(f"the connection to {self.address} broke: {exc or 'closed by it'}"))

    def get_buffer(self, sizehint: int) -> memoryview:
        rest = min(self._frame_left, self._message_bytes - self._message_filled)
        self._is_direct = self._parsed == self._filled and rest >= _DIRECT_BYTES
        if self._is_direct:
            start = self._message_filled
            return self._message.data[start : start + rest]
        self._scratch[: self._filled - self._parsed] = self._scratch[self._parsed : self._filled]
        self._filled -= self._parsed
        self._parsed = 0
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._is_direct:
                self._frame_left -= nbytes
                self._grow_message(nbytes)
                self._end_frame()
            else:
                self._filled += nbytes
                self._parse()
        except Exception as error:
            self._fail(error if not isinstance(error, h2.H2Error) else self._lost(error))

    # Frames -----------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Everything in `_scratch` that is complete."""
        while not self._is_closed:
            if self._in_data:
                if self._parsed == self._filled:
                    return
                self._parse_data()
            elif not self._parse_frame():
                return

    def _parse_frame(self) -> bool:
        """A frame other than DATA, or the header of a DATA frame. False: more has to come."""
        available = self._filled - self._parsed
        if available < h2.FRAME_HEADER_BYTES:
            return False
        length, kind, flags, stream = h2.parse_frame_header(self._scratch[self._parsed :])
        if kind == h2.FrameKind.DATA:
            self._parsed += h2.FRAME_HEADER_BYTES
            self._begin_data(length, flags)
            return True
        size = h2.FRAME_HEADER_BYTES + length
        if size > _SCRATCH_BYTES:
            raise h2.H2Error(f"a frame of {length} bytes that is not data")
        if available < size:
            return False
        start = self._parsed + h2.FRAME_HEADER_BYTES
        self._parsed += size
        self._on_frame(kind, flags, stream, bytes(self._scratch[start : start + length]))
        return True

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == h2.FrameKind.HEADERS:
            self._header_flags = flags
            self._header_block = h2.without_padding(payload, flags)
            self._on_headers(flags)
        elif kind == h2.FrameKind.CONTINUATION:
            self._header_block += payload
            self._on_headers(flags)
        elif kind == h2.FrameKind.SETTINGS and not flags & h2.ACK:
            self._write(h2.frame(h2.FrameKind.SETTINGS, h2.ACK, 0))
        elif kind == h2.FrameKind.PING and not flags & h2.ACK:
            self._write(h2.frame(h2.FrameKind.PING, h2.ACK, 0, payload))
        elif kind == h2.FrameKind.RST_STREAM and stream == self._stream:
            raise h2.H2Error(f"the call was reset with code {int.from_bytes(payload)}")
        elif kind == h2.FrameKind.GOAWAY:
            raise h2.H2Error("the peer is going away")

    def _on_headers(self, flags: int) -> None:
        """Headers at the beginning of the answer, trailers at its end."""
        if not flags & h2.END_HEADERS:
            return
        fields = h2.parse_headers(self._header_block)
        if fields.get(":status", "200") != "200":
            raise h2.H2Error(f"HTTP status {fields[':status']}")
        if self._header_flags & h2.END_STREAM:
            self._end_call(fields)

    def _end_call(self, fields: dict[str, str]) -> None:
        code = _STATUS_CODES.get(fields.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
        if self._done is None or self._done.done():
            return
        if self._message_bytes or self._prefix:
            raise h2.H2Error("the stream ended in the middle of a message")
        if code is grpc.StatusCode.OK:
            self._done.set_result(None)
        else:
            self._done.set_exception(CallRefused(code, unquote(fields.get("grpc-message", ""))))

    # Messages ---------------------------------------------------------------------------------

    def _begin_data(self, length: int, flags: int) -> None:
        if flags & h2.PADDED:
            raise h2.H2Error("padded data")
        self._frame_left = length
        self._in_data = length > 0
        self._unacknowledged += length
        if self._unacknowledged >= _WINDOW_UPDATE_BYTES:
            count, self._unacknowledged = self._unacknowledged, 0
            self._write(h2.window_update(0, count) + h2.window_update(self._stream, count))

    def _parse_data(self) -> None:
        """A piece of the DATA frame that lies in `_scratch`."""
        count = min(self._frame_left, self._filled - self._parsed)
        if self._message_bytes == 0:
            count = min(count, _PREFIX.size - len(self._prefix))
            self._frame_left -= count
            self._prefix += self._scratch[self._parsed : self._parsed + count]
            self._parsed += count
            if len(self._prefix) == _PREFIX.size:
                self._begin_message()
        else:
            count = min(count, self._message_bytes - self._message_filled)
            self._frame_left -= count
            at = self._message_filled
            self._message.data[at : at + count] = self._scratch[self._parsed : self._parsed + count]
            self._parsed += count
            self._grow_message(count)
        self._end_frame()

    def _begin_message(self) -> None:
        is_compressed, length = _PREFIX.unpack(self._prefix)
        self._prefix.clear()
        if is_compressed or not 0 < length <= _MAX_MESSAGE_BYTES:
            raise h2.H2Error(f"a message of {length} bytes, or a compressed one")
        if length > len(self._message):
            self._message = np.empty(length, np.uint8)
        self._message_bytes = length
        self._message_filled = 0

    def _grow_message(self, num_bytes: int) -> None:
        self._message_filled += num_bytes
        if self._message_filled == self._message_bytes:
            length, self._message_bytes, self._message_filled = self._message_bytes, 0, 0
            if self._take is not None:
                self._take(self._message[:length])

    def _end_frame(self) -> None:
        self._in_data = self._frame_left > 0

    # The end ----------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._is_closed:
            self._transport.write(data)

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"{self.address}: {error}")

    def _fail(self, error: Exception) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._transport is not None:
                self._transport.abort()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
