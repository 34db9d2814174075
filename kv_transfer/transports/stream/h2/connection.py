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
     ^ into `_scratch`, little at once  ^ into the sink's memory: by a thread, if it is much

While a thread reads, the event loop leaves the socket alone. All that is known of the connection
changes on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from urllib.parse import unquote

import grpc

from edge.h2 import frames as h2
from edge.h2.send_threads import Connection
from edge.h2.tls_socket import TlsSocket
from edge.security.credentials import Credentials
from kv_transfer.errors import PeerLost
from kv_transfer.transports.late_cancel import outlast_cancels
from kv_transfer.transports.stream.h2.dial import dial
from kv_transfer.transports.stream.h2.messages import ArrivingMessages
from kv_transfer.transports.stream.h2.receive_threads import (
    LowWater,
    Reading,
    Received,
    ReceiveThreads,
)
from kv_transfer.wire.pull_client import MessageSink

_SCRATCH_BYTES = 64 << 10
_AHEAD_BYTES = 4096
"""Read at once where no message is in motion: all of a short one, little of a long one, because
what belongs to it is copied once more."""
_WINDOW_UPDATE_BYTES = 64 << 20
_MAX_STREAM = 1 << 30

_STATUS_CODES = {str(code.value[0]): code for code in grpc.StatusCode}


class CallRefused(Exception):
    """The server ended the call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class H2Connection:
    """Owns `sock`, which is connected and does not block. `threads` read much at once."""

    def __init__(self, address: str, sock: Connection, threads: ReceiveThreads) -> None:
        self.address = address
        self.used_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._low_water = LowWater(sock)
        self._threads = threads
        self._reading: Reading | None = None
        """Not None while a thread reads."""
        self._is_unread = asyncio.Event()
        """No thread uses the socket or memory of the sink."""
        self._is_unread.set()
        self._is_closed = False
        self._is_going = False
        self._stream = -1
        self._done: asyncio.Future[None] | None = None
        self._messages = ArrivingMessages()
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
        self._unacknowledged = 0
        """Bytes that have arrived, of all calls, and that the server may not send anew yet."""
        self._unacknowledged_of_call = 0
        self._is_listening = False
        self._listen(True)
        self._write(h2.client_opening())

    @classmethod
    async def connect(
        cls, address: str, credentials: Credentials, threads: ReceiveThreads, source: str = ""
    ) -> H2Connection:
        """Connects as `dial` does. Raises `PeerLost`."""
        return cls(address, await dial(address, credentials, source), threads)

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
        """Returns after a complete stream. However it ends, `sink` is called with nothing more
        then, and nothing more is written to its memory.

        Raises:
            CallRefused: The server's status says no.
            PeerLost: The connection broke.
            Exception: Whatever `sink` raised.
        """
        if not self.is_usable:
            raise PeerLost(f"the connection to {self.address} broke before the call")
        self._stream += 2
        self._unacknowledged_of_call = 0
        self._messages.sink = sink
        self._done = self._loop.create_future()
        self._write(h2.request(self._stream, path, self.address, message, metadata))
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            # A thread that reads never waits for a peer.
            await outlast_cancels(lambda: self._reading is None, self._is_unread.wait)
            self._done = None
            self._messages.sink = None
            self.used_at = time.monotonic()

    def close(self) -> None:
        """Closes at once. A call in motion fails. Idempotent."""
        self._fail(PeerLost(f"the connection to {self.address} was given up"))

    # Bytes in ---------------------------------------------------------------------------------

    def _read(self) -> None:
        self._take_in(self._read_on)

    def _take_in(self, take: Callable[[], None]) -> None:
        """Whatever goes wrong with bytes that arrive ends the connection."""
        try:
            take()
        except (BlockingIOError, InterruptedError):
            return
        except (h2.H2Error, OSError) as error:
            self._fail(self._lost(error))
        except Exception as error:
            self._fail(error)

    def _read_on(self) -> None:
        """Reads what is there, or lets a thread do so."""
        if not self._hand_over():
            self._read_once()
            self._go_on()

    def _go_on(self) -> None:
        """Reads on after all that has come was parsed, or waits."""
        while not (self._is_closed or self._hand_over()):
            if self._tls is None or not self._tls.has_read_ahead:
                self._low_water.wait_for(self._num_sure)
                self._listen(True)
                return
            self._read_once()

    def _read_once(self) -> None:
        views, behind = self._room()
        count = self._socket.recvmsg_into([*views, behind])[0]
        if count == 0:
            raise ConnectionError("closed by it")
        num_direct = min(count, sum(len(view) for view in views))
        self._messages.tell(num_direct)
        self._received(num_direct, count - num_direct)

    @property
    def _num_sure(self) -> int:
        """Returns how much of a message will come without anything else between."""
        return min(self._frame_left, self._messages.num_left)

    def _room(self) -> tuple[list[memoryview], memoryview]:
        """Returns where the next bytes go: those of a message, and what comes behind."""
        pending = self._filled - self._parsed
        rest = self._num_sure if pending == 0 else 0
        if pending:
            self._scratch[:pending] = self._scratch[self._parsed : self._filled]
        self._parsed, self._filled = 0, pending
        views = self._messages.rest(rest)
        is_all = sum(len(view) for view in views) == rest
        num_behind = max(self._needed - pending, _AHEAD_BYTES) if is_all else 0
        return views, self._scratch[pending : pending + num_behind]

    def _received(self, num_direct: int, num_behind: int) -> None:
        """Called when `count` bytes were written into the buffer from `_room`."""
        self._filled += num_behind
        if num_direct:
            self._count_data(num_direct)
            self._messages.filled(num_direct)
        self._parse()

    # Bytes in, by a thread --------------------------------------------------------------------

    def _hand_over(self) -> bool:
        """Lets a thread read the rest of a message, if that is much. Returns whether it does."""
        sink = self._messages.sink
        if sink is None or self._num_sure < self._threads.worth_bytes:
            return False
        self._listen(False)
        self._reading = Reading(self._socket, self._low_water, *self._room(), sink.fill)
        self._is_unread.clear()
        self._threads.receive(self._reading, self._thread_is_done, self._loop)
        return True

    def _thread_is_done(self, result: Received | Exception) -> None:
        self._reading = None
        self._is_unread.set()
        if self._is_closed:
            self._close_socket()
        else:
            self._take_in(lambda: self._read_by_thread(result))

    def _read_by_thread(self, result: Received | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        self._received(*result)
        if result.num_bytes:
            self._go_on()
        else:
            # Nothing came for a while: no thread waits for more than a moment.
            self._low_water.wait_for(self._num_sure)
            self._listen(True)

    def _listen(self, is_wanted: bool) -> None:
        """Lets the event loop tell us of bytes, or not."""
        if is_wanted and not self._is_listening:
            self._loop.add_reader(self._socket.fileno(), self._read)
        elif self._is_listening and not is_wanted:
            self._loop.remove_reader(self._socket.fileno())
        self._is_listening = is_wanted

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
        is_amid_message = self._messages.is_amid
        self._messages.drop()
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
        taken = self._messages.take(self._scratch[self._parsed : self._parsed + count])
        self._count_data(taken)
        self._parsed += taken

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

    def _close_socket(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"the connection to {self.address} broke: {error}")

    def _fail(self, error: Exception) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._listen(False)
            self._loop.remove_writer(self._socket.fileno())
            self._messages.drop()
            if self._reading is None:
                self._close_socket()
            else:
                self._reading.give_up()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
