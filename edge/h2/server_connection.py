"""One connection of a peer to our server: frames in, calls, answers out through `H2Writer`.

    1. the peer's preface and SETTINGS, ours meanwhile
    2. calls: HEADERS begin one, DATA fill it, END_STREAM starts its handler
    3. a call ends by its trailers, or by RST_STREAM
    4. anything that is wrong ends the connection with GOAWAY; so does silence (`check_alive`)

What a peer sends is bounded everywhere: frames, headers, requests, calls, and answers to frames
that must be answered. Before a caller is known, that is when its headers have been judged, nothing
is kept of a call; and a connection that has ended keeps nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from edge.h2 import frames as h2
from edge.h2.call import CallAborted, H2Call
from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod
from edge.h2.send_threads import Connection, SendThreads, send_now
from edge.h2.tls_socket import TlsSocket
from edge.h2.writer import H2Writer
from edge.security.credentials import CallerRefused
from edge.security.tls_files import certificate_names

_READ_BYTES = 64 << 10
_FRAMES_AT_ONCE = 5000
_FRAMES_PER_S = 500.0
"""That carry nothing, or cost an answer: pings, settings, resets, refused calls, empty data."""
_PING = h2.frame(h2.FrameKind.PING, 0, 0, b"tandemkv")

logger = logging.getLogger(__name__)


class Judge(Protocol):
    """Judges calls."""

    def __call__(
        self, names: Collection[str] | None, headers: Mapping[str, str], *, is_plaintext: bool
    ) -> None:
        """Takes the DNS names of the certificate that was shown, if any, the headers of a call, and
        whether it came without TLS. Raises `CallerRefused`."""


def welcome(
    names: Collection[str] | None, headers: Mapping[str, str], *, is_plaintext: bool
) -> None:
    """Any caller may do so."""


class H2ServerConnection:
    """`on_closed` is called once."""

    def __init__(
        self,
        sock: Connection,
        methods: Mapping[str, RpcMethod],
        judge: Judge,
        threads: SendThreads,
        on_closed: Callable[[H2ServerConnection], None],
        max_calls: int,
    ) -> None:
        self._socket = sock
        self._methods = methods
        self._judge = judge
        self._is_plaintext = not isinstance(sock, TlsSocket)
        self._names = (
            certificate_names(sock.peer_certificate) if isinstance(sock, TlsSocket) else None
        )
        self._on_closed = on_closed
        self._max_calls = max_calls
        self._loop = asyncio.get_running_loop()
        self._writer = H2Writer(sock, threads, self._fail)
        self._calls: dict[int, H2Call] = {}
        self._last_stream = 0
        self._headers = h2.HeaderReader()
        self._window = h2.DEFAULT_WINDOW
        """The peer lets us send this much on a new stream."""
        self._received = bytearray()
        self._has_preface = False
        self._has_settings = False
        self._last_read_at = time.monotonic()
        self._is_closed = False
        self._patience = float(_FRAMES_AT_ONCE)
        """Frames of the tiresome kinds that are still borne with."""
        self._patience_at = self._last_read_at
        self._loop.add_reader(sock.fileno(), self._read)
        self._writer.control(
            h2.settings_frame(
                {
                    h2.Setting.MAX_CONCURRENT_STREAMS: max_calls,
                    h2.Setting.MAX_HEADER_LIST_SIZE: h2.MAX_HEADER_BYTES,
                }
            )
        )

    def extend_silence_deadline(self, seconds: float) -> None:
        """This process stalled: that time does not count against the peer."""
        self._last_read_at += seconds

    def check_alive(self, ping_after_s: float, give_up_after_s: float) -> None:
        """Asks a peer that is silent, and leaves one that does not answer."""
        silence = time.monotonic() - self._last_read_at
        if silence > give_up_after_s or (silence > ping_after_s and not self._has_settings):
            self.close(h2.ErrorCode.NO_ERROR, "nothing was heard")
        elif silence > ping_after_s:
            try:
                self._writer.control(_PING)
            except h2.H2Error as error:
                self._fail(error)

    def close(self, code: h2.ErrorCode = h2.ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Closes at once: calls are cancelled. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        if not self._writer.is_amid_frame:
            send_now(self._socket, [h2.go_away(self._last_stream, code, reason)])
        for call in list(self._calls.values()):
            call.cancel()
        self._writer.close()
        self._received.clear()
        self._on_closed(self)

    def _fail(self, error: Exception) -> None:
        code = error.code if isinstance(error, h2.H2Error) else h2.ErrorCode.NO_ERROR
        self.close(code, str(error))

    # Frames in --------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        if not data:
            self.close()
            return
        self._last_read_at = time.monotonic()
        self._received += data
        try:
            self._parse()
        except h2.H2Error as error:
            self._fail(error)

    def _parse(self) -> None:
        received = self._received
        if not self._has_preface:
            if not h2.PREFACE.startswith(received[: len(h2.PREFACE)]):
                raise h2.H2Error("this port speaks HTTP/2 only")
            if len(received) < len(h2.PREFACE):
                return
            del received[: len(h2.PREFACE)]
            self._has_preface = True
        while len(received) >= h2.FRAME_HEADER_BYTES and not self._is_closed:
            length, kind, flags, stream = h2.parse_frame_header(received)
            if length > h2.DEFAULT_FRAME_BYTES:
                raise h2.H2Error("a frame is too long", h2.ErrorCode.FRAME_SIZE_ERROR)
            size = h2.FRAME_HEADER_BYTES + length
            if len(received) < size:
                return
            payload = bytes(received[h2.FRAME_HEADER_BYTES : size])
            del received[:size]
            self._on_frame(kind, flags, stream, payload)

    def _bear(self) -> None:
        """Bears one more frame that costs us and not the peer. Raises `H2Error` when it is too
        many."""
        since, self._patience_at = self._patience_at, self._last_read_at
        earned = (self._last_read_at - since) * _FRAMES_PER_S
        self._patience = min(float(_FRAMES_AT_ONCE), self._patience + earned) - 1
        if self._patience < 0:
            raise h2.H2Error("too many frames of no use", h2.ErrorCode.ENHANCE_YOUR_CALM)

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        is_continued = kind == h2.FrameKind.CONTINUATION
        if self._headers.is_waiting != is_continued:
            raise h2.H2Error("headers are not continued as they should be")
        if not self._has_settings and kind != h2.FrameKind.SETTINGS:
            raise h2.H2Error("the first frame is not SETTINGS")
        match kind:
            case h2.FrameKind.DATA:
                self._on_data(flags, stream, payload)
            case h2.FrameKind.HEADERS:
                if stream == 0 or stream % 2 == 0:
                    raise h2.H2Error("a client's streams have odd numbers")
                self._on_headers(stream, self._headers.begin(stream, flags, payload))
            case h2.FrameKind.CONTINUATION:
                self._on_headers(stream, self._headers.go_on(stream, flags, payload))
            case h2.FrameKind.RST_STREAM:
                self._on_reset(stream)
            case h2.FrameKind.SETTINGS:
                self._bear()
                self._on_settings(flags, payload)
            case h2.FrameKind.PING if not flags & h2.ACK:
                self._bear()
                self._writer.control(h2.frame(h2.FrameKind.PING, h2.ACK, 0, payload[:8]))
            case h2.FrameKind.WINDOW_UPDATE:
                self._on_window_update(stream, h2.parse_window_update(payload))
            case h2.FrameKind.PUSH_PROMISE:
                raise h2.H2Error("a client must not push")
            case _:
                self._bear()

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        call = self._calls.get(stream)
        if stream == 0 or stream > self._last_stream:
            raise h2.H2Error("data without a call")
        if call is None or not payload:
            self._bear()
        if payload:
            update = h2.window_update(0, len(payload))
            if call is None:
                self._writer.control(update)
            elif flags & h2.END_STREAM:
                self._writer.queue_control(update)  # The answer takes it along.
            else:
                self._writer.control(update + h2.window_update(stream, len(payload)))
        if call is None or call.has_started:
            return
        call.receive(h2.without_padding(payload, flags & h2.PADDED))
        if flags & h2.END_STREAM:
            call.start(self._answer(call))

    def _on_headers(self, stream: int, block: tuple[dict[str, str], bool] | None) -> None:
        if block is None:
            return
        fields, is_end = block
        call = self._calls.get(stream)
        if call is not None and is_end and not call.has_started:
            call.start(self._answer(call))
            return
        if stream <= self._last_stream:
            raise h2.H2Error("a stream is used twice")
        self._last_stream = stream
        method = self._methods.get(fields.get(":path", ""))
        if len(self._calls) >= self._max_calls:
            self._bear()
            self._writer.control(h2.reset(stream, h2.ErrorCode.REFUSED_STREAM))
        elif method is None:
            self._refuse(stream, grpc.StatusCode.UNIMPLEMENTED, "unknown method")
        elif (refusal := self._judged(fields)) is not None:
            self._refuse(stream, refusal.code, str(refusal))
        else:
            call = H2Call(stream, method, fields, self._writer, self._window, self._forget)
            self._calls[stream] = call
            if is_end:
                call.start(self._answer(call))

    def _judged(self, fields: Mapping[str, str]) -> CallerRefused | None:
        try:
            self._judge(self._names, fields, is_plaintext=self._is_plaintext)
        except CallerRefused as error:
            return error
        return None

    def _refuse(self, stream: int, code: grpc.StatusCode, details: str) -> None:
        self._bear()
        status: int = code.value[0]
        self._writer.control(h2.trailers(stream, status, details, is_first=True))

    def _on_reset(self, stream: int) -> None:
        call = self._calls.get(stream)
        if stream == 0 or stream > self._last_stream:
            raise h2.H2Error("a call is reset that never was")
        if call is None:
            self._bear()
        else:
            call.cancel()

    def _on_settings(self, flags: int, payload: bytes) -> None:
        """Acknowledges settings. What was cut before goes out first, and keeps to the old settings;
        what the new ones allow comes behind."""
        if flags & h2.ACK:
            return
        self._writer.queue_control(h2.frame(h2.FrameKind.SETTINGS, h2.ACK, 0))
        for key, value in h2.parse_settings(payload):
            if key == h2.Setting.MAX_FRAME_SIZE:
                if not h2.DEFAULT_FRAME_BYTES <= value <= h2.MAX_FRAME_BYTES:
                    raise h2.H2Error("MAX_FRAME_SIZE out of bounds")
                self._writer.max_frame_bytes = value
            elif key == h2.Setting.INITIAL_WINDOW_SIZE:
                self._change_windows(value)
        self._has_settings = True
        self._writer.pump()

    def _change_windows(self, window: int) -> None:
        if window > h2.MAX_WINDOW:
            raise h2.H2Error("a window is too large", h2.ErrorCode.FLOW_CONTROL_ERROR)
        change, self._window = window - self._window, window
        for call in self._calls.values():
            call.grow_window(change)

    def _on_window_update(self, stream: int, num_bytes: int) -> None:
        call = self._calls.get(stream)
        if stream == 0:
            self._writer.grow_window(num_bytes)
        elif stream > self._last_stream:
            raise h2.H2Error("a window of a call that never was")
        elif call is not None:
            call.grow_window(num_bytes)
        self._writer.pump()

    # Calls ------------------------------------------------------------------------------------

    def _forget(self, call: H2Call) -> None:
        self._calls.pop(call.stream, None)

    async def _answer(self, call: H2Call) -> None:
        try:
            answer = await call.method.handle(call.method.parse(call.request()), call)
            if call.method.serialize is not None:
                await call.write(OutMessage([call.method.serialize(answer)]))
            call.end(grpc.StatusCode.OK, "")
        except CallAborted as refusal:
            call.end(refusal.code, refusal.details)
        except DecodeError:
            call.end(grpc.StatusCode.INTERNAL, "the request cannot be read")
        except Exception:
            logger.exception("a call failed unexpectedly")
            call.end(grpc.StatusCode.UNKNOWN, "the call failed unexpectedly; the log says why")
