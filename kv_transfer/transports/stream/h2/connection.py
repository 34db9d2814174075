"""A connection that makes gRPC calls which receive streams of large messages, cheaply.

grpcio hands every message over after three copies under Python's lock. Here the kernel writes a
message's bytes straight to where they belong: `bench/kv/transfer.py` measures what that saves. On
the wire it is gRPC; the server may be ours or grpcio's.

    1. `connect` opens the connection; settings are exchanged while the first call is on its way
    2. `call` sends a request and gives every message to a `MessageSink`, until the trailers have
       come
    3. one call at a time; a call that is cancelled takes its connection with it
    4. `close`

How bytes become messages:

    |frame header 9|prefix 5|head 64|message ......|frame header|.... message|prefix| ...
     ^ into `_scratch`, little at once  ^ into the sink's memory, however large
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from urllib.parse import unquote

import grpc

from edge.security.credentials import Credentials
from kv_transfer.errors import PeerLost
from kv_transfer.transports.stream.h2 import frames as h2
from kv_transfer.transports.stream.h2.dial import dial
from kv_transfer.transports.stream.h2.send_threads import Connection
from kv_transfer.transports.stream.h2.tls_socket import TLS_AHEAD_BYTES, TlsSocket
from kv_transfer.wire.pull_client import HEAD_BYTES, MessageSink

_SCRATCH_BYTES = 64 << 10
_AHEAD_BYTES = 4096
"""Read at once where no message is in motion: all of a short one, little of a long one, because
what belongs to it is copied once more."""
_LOW_WATER_BYTES = 256 << 10
_MAX_VIEWS = 256
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


class H2Connection:
    """Owns `sock`, which is connected and does not block."""

    def __init__(self, address: str, sock: Connection) -> None:
        self.address = address
        self.used_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._is_closed = False
        self._is_going = False
        self._stream = -1
        self._done: asyncio.Future[None] | None = None
        self._sink: MessageSink | None = None
        self._unsent = b""
        self._headers = h2.HeaderReader()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._parsed = 0
        self._filled = 0
        """`_scratch[_parsed:_filled]` is received and not looked at yet."""
        self._needed = 0
        """Bytes from `_parsed` on without which nothing can be parsed."""
        self._frame_left = 0
        """Bytes of the DATA frame that are still to come."""
        self._head = bytearray()
        """Prefix and head of a message whose sink is not asked yet."""
        self._views: deque[memoryview] = deque()
        """The rest of the message goes here."""
        self._message_left = 0
        self._direct_bytes = 0
        self._low_water = 1
        self._unacknowledged = 0
        """Bytes that have arrived, of all calls, and that the server may not send anew yet."""
        self._unacknowledged_of_call = 0
        self._loop.add_reader(sock.fileno(), self._read)
        self._write(h2.client_opening())

    @classmethod
    async def connect(
        cls, address: str, credentials: Credentials, source: str = ""
    ) -> H2Connection:
        """Connects as `dial` does. Raises `PeerLost`."""
        return cls(address, await dial(address, credentials, source))

    @property
    def is_usable(self) -> bool:
        """Returns whether another call may be made."""
        is_free = self._done is None and self._stream < _MAX_STREAM
        return is_free and not self._is_closed and not self._is_going

    async def call(
        self,
        path: str,
        message: bytes,
        sink: MessageSink,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Returns after a complete stream.

        Raises:
            CallRefused: The server's status says no.
            PeerLost: The connection broke.
            Exception: Whatever `sink` raised.
        """
        if not self.is_usable:
            raise PeerLost(f"the connection to {self.address} broke before the call")
        self._stream += 2
        self._unacknowledged_of_call = 0
        self._sink = sink
        self._done = self._loop.create_future()
        self._write(h2.request(self._stream, path, self.address, message, metadata))
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = None
            self._sink = None
            self.used_at = time.monotonic()

    def close(self) -> None:
        """Closes at once. A call in motion fails. Idempotent."""
        self._fail(PeerLost(f"the connection to {self.address} was given up"))

    # Bytes in ---------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_once()
            while self._tls is not None and not self._is_closed and self._tls.has_read_ahead:
                self._read_once()
            self._sleep_until_worth_it()
        except (BlockingIOError, InterruptedError):
            return
        except (h2.H2Error, OSError) as error:
            self._fail(self._lost(error))
        except Exception as error:
            self._fail(error)

    def _read_once(self) -> None:
        count = self._socket.recvmsg_into(self._room())[0]
        if count == 0:
            raise ConnectionError("closed by it")
        self._received(count)

    def _sleep_until_worth_it(self) -> None:
        """Few large reads cost much less than many small ones. What is waited for is sure to come:
        it is the rest of a frame that has begun, but for what TLS has taken in already."""
        if self._is_closed:
            return
        sure = min(self._frame_left, self._message_left, _LOW_WATER_BYTES)
        low_water = max(1, sure if self._tls is None else sure - TLS_AHEAD_BYTES)
        if low_water != self._low_water:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _room(self) -> list[memoryview]:
        """Returns where the next bytes go: the rest of a message, and a little behind it."""
        pending = self._filled - self._parsed
        rest = min(self._frame_left, self._message_left) if pending == 0 else 0
        if pending:
            self._scratch[:pending] = self._scratch[self._parsed : self._filled]
        self._parsed, self._filled = 0, pending
        views = _first(self._views, rest)
        self._direct_bytes = sum(len(view) for view in views)
        if self._direct_bytes == rest:
            views.append(self._scratch[pending : max(self._needed, pending + _AHEAD_BYTES)])
        return views

    def _received(self, count: int) -> None:
        direct = min(count, self._direct_bytes)
        self._filled += count - direct
        if direct:
            self._fill_message(direct)
        self._parse()

    def _parse(self) -> None:
        """Parses everything in `_scratch` that is complete."""
        self._needed = 0
        while not self._is_closed:
            if self._frame_left:
                if self._parsed == self._filled:
                    return
                self._parse_data()
            elif not self._parse_frame():
                return

    def _parse_frame(self) -> bool:
        """Parses a frame other than DATA, or the header of a DATA frame. False: more has to
        come."""
        available = self._filled - self._parsed
        if available < h2.FRAME_HEADER_BYTES:
            return False
        length, kind, flags, stream = h2.parse_frame_header(self._scratch[self._parsed :])
        if kind == h2.FrameKind.DATA:
            self._parsed += h2.FRAME_HEADER_BYTES
            self._begin_data(length, flags, stream)
            return True
        size = h2.FRAME_HEADER_BYTES + length
        if size > _SCRATCH_BYTES // 2:
            raise h2.H2Error(f"a frame of {length} bytes that is not data")
        if available < size:
            self._needed = size
            return False
        start = self._parsed + h2.FRAME_HEADER_BYTES
        self._parsed += size
        self._on_frame(kind, flags, stream, bytes(self._scratch[start : start + length]))
        return True

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == h2.FrameKind.HEADERS:
            self._on_headers(self._headers.begin(stream, flags, payload))
        elif kind == h2.FrameKind.CONTINUATION:
            self._on_headers(self._headers.go_on(stream, flags, payload))
        elif kind == h2.FrameKind.SETTINGS and not flags & h2.ACK:
            self._write(h2.frame(h2.FrameKind.SETTINGS, h2.ACK, 0))
        elif kind == h2.FrameKind.PING and not flags & h2.ACK:
            self._write(h2.frame(h2.FrameKind.PING, h2.ACK, 0, payload))
        elif kind == h2.FrameKind.RST_STREAM and stream == self._stream:
            raise h2.H2Error(f"the call was reset with code {int.from_bytes(payload)}")
        elif kind == h2.FrameKind.GOAWAY:
            self._on_go_away(payload)

    def _on_go_away(self, payload: bytes) -> None:
        """A call that the server still finishes goes on."""
        last_stream, code = int.from_bytes(payload[:4]), int.from_bytes(payload[4:8])
        self._is_going = True
        if code or self._done is None or last_stream < self._stream:
            reason = payload[8:].decode(errors="replace")
            raise h2.H2Error(f"the peer is going away {reason}".strip())

    def _on_headers(self, block: tuple[dict[str, str], bool] | None) -> None:
        """Headers at the beginning of the answer, trailers at its end."""
        if block is None:
            return
        fields, is_end = block
        if fields.get(":status", "200") != "200":
            raise h2.H2Error(f"HTTP status {fields[':status']}")
        if is_end:
            self._end_call(fields)

    def _end_call(self, fields: dict[str, str]) -> None:
        code = _STATUS_CODES.get(fields.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
        if self._done is None or self._done.done():
            return
        is_amid_message = bool(self._message_left or self._head)
        self._message_left = 0
        self._head.clear()
        self._views.clear()
        if code is not grpc.StatusCode.OK:
            details = unquote(fields.get("grpc-message", ""))
            self._done.set_exception(CallRefused(code, details))
        elif is_amid_message:
            raise h2.H2Error("the stream ended in the middle of a message")
        else:
            self._done.set_result(None)

    # Messages ---------------------------------------------------------------------------------

    def _begin_data(self, length: int, flags: int, stream: int) -> None:
        if flags & h2.PADDED:
            raise h2.H2Error("padded data")
        if stream != self._stream or self._done is None:
            raise h2.H2Error("data without a call")
        self._frame_left = length

    def _parse_data(self) -> None:
        """Parses a piece of the DATA frame that lies in `_scratch`."""
        count = min(self._frame_left, self._filled - self._parsed)
        if self._message_left == 0:
            count = min(count, self._num_head_missing())
            self._head += self._scratch[self._parsed : self._parsed + count]
            self._count_data(count)
            if self._num_head_missing() == 0:
                self._begin_message()
        else:
            count = min(count, self._message_left)
            at = self._parsed
            for view in _first(self._views, count):
                view[:] = self._scratch[at : at + len(view)]
                at += len(view)
            count = at - self._parsed
            self._fill_message(count)
        self._parsed += count

    def _num_head_missing(self) -> int:
        """Returns the bytes that prefix and head still lack."""
        missing = _PREFIX.size - len(self._head)
        if missing > 0:
            return missing
        is_compressed, length = _PREFIX.unpack_from(self._head)
        if is_compressed or not 0 < length <= _MAX_MESSAGE_BYTES:
            raise h2.H2Error(f"a message of {length} bytes, or a compressed one")
        return _PREFIX.size + int(min(length, HEAD_BYTES)) - len(self._head)

    def _begin_message(self) -> None:
        length: int = _PREFIX.unpack_from(self._head)[1]
        head = bytes(self._head[_PREFIX.size :])
        self._head.clear()
        if self._sink is None:
            return
        self._message_left = length - len(head)
        self._views.extend(self._sink.begin(head, length))
        if self._message_left == 0:
            self._sink.end()

    def _fill_message(self, count: int) -> None:
        """So many bytes were written to the first of `_views`."""
        self._count_data(count)
        self._message_left -= count
        while count and self._sink is not None:
            view = self._views.popleft()
            if len(view) > count:
                self._views.appendleft(view[count:])
                view = view[:count]
            count -= len(view)
            self._sink.fill(view)
        if self._message_left == 0 and self._sink is not None:
            self._sink.end()

    def _count_data(self, count: int) -> None:
        """Counts bytes of a DATA frame that have arrived, so that the server may send more."""
        self._frame_left -= count
        self._unacknowledged += count
        self._unacknowledged_of_call += count
        if self._unacknowledged >= _WINDOW_UPDATE_BYTES:
            self._write(h2.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        if self._unacknowledged_of_call >= _WINDOW_UPDATE_BYTES:
            self._write(h2.window_update(self._stream, self._unacknowledged_of_call))
            self._unacknowledged_of_call = 0

    # Bytes out, and the end -------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._is_closed:
            return
        is_waiting = bool(self._unsent)
        self._unsent += data
        if not is_waiting:
            self._flush()
            if self._unsent and not self._is_closed:
                self._loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(self._lost(error))
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"the connection to {self.address} broke: {error}")

    def _fail(self, error: Exception) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            with suppress(OSError):
                self._socket.close()
            self._views.clear()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def _first(views: deque[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns the first `num_bytes` of these, or as many as one system call takes."""
    found: list[memoryview] = []
    for view in islice(views, _MAX_VIEWS):
        if num_bytes == 0:
            break
        found.append(view[:num_bytes])
        num_bytes -= len(found[-1])
    return found
