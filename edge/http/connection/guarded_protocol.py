"""Guards HTTP/1.1 connections of clients by bounds that uvicorn itself does not have.

1. connected     from here on the head of a request has `header_timeout_s` to arrive complete,
                 however its bytes trickle; the same at the first byte of each further request
2. head complete the clock stops. Heads that may be read in two ways, or are beyond
                 `max_header_bytes`, are refused before anything is routed by them, and who has no
                 key before any of the body is read
3. body          read by the handler of the request, with a clock of its own
4. answered      the next request, or the end. Nothing behind a request is parsed before its answer
                 has ended, and what is here of it goes with the connection. An answer that ends
                 before its request has arrived ends the connection: nothing would read the rest
-  refused       the answer is sent, then what still comes is thrown away for a moment: closing at
                 once would reset the connection, and the client would lose the answer. In the midst
                 of another answer it would be taken for a part of that one: then it is only closed
-  unread        a client that takes nothing of what is sent for `send_timeout_s` is cut off
-  unknown       until a valid key was shown, where keys are asked for. There may be
                 `max_without_key` of these; for one more the oldest is closed
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.http.bodies.body_framing import BodyFraming
from edge.http.bodies.body_room import FREE_BYTES
from edge.http.connection.answer_transport import (
    WRITE_DIRECTLY,
    AnswerTransport,
    cut_loops,
    detach,
    write_directly,
)
from edge.http.connection.bounded_reads import ReadRoom, bounded
from edge.http.connection.client_connection import GONE, headers_of
from edge.http.connection.gone_clients import GoneClients
from edge.http.connection.offered_protocol import has_body, length_of_body, parser_of_body
from edge.http.connection.old_client import send_without_chunks
from edge.http.connection.parse_turns import HeldFlow, ParseTurns
from edge.http.connection.refusal import StopParsing, fault_of, refusal
from edge.http.connection.request_cutter import RequestCutter
from edge.http.connection.send_clock import HELD_UP_S, SendClock
from edge.http.errors import BadHead, HeadTooLarge, HttpError, RequestTimeout
from edge.http.front import HttpFront
from edge.http.request_head import HeadCheck, RequestHead
from edge.security.tls_files import certificate_names

CALLER = "caller"
"""The key under which each request's state holds what `HeadCheck.admit` has returned."""

_LINGER_S = 1.0
_FIRST_WORDS_S = 2.0
"""A new connection is not taken for one that shows no key before it has had time to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds connections. `max_per_address` and `max_without_key` are any number when they are
    0."""

    header_timeout_s: float = 10.0
    max_header_bytes: int = 16 << 10
    max_per_address: int = 0
    max_without_key: int = 0
    send_timeout_s: float = 20.0


@dataclass(slots=True)
class OpenConnections:
    """Counts all connections of one listener. `unknown` begins with the oldest."""

    by_address: Counter[str] = field(default_factory=Counter)
    turns: ParseTurns = field(default_factory=ParseTurns)
    gone: GoneClients = field(default_factory=GoneClients)
    reads: ReadRoom = field(default_factory=ReadRoom)
    unknown: dict[GuardedProtocol, float] = field(default_factory=dict)


class GuardedProtocol(HttpToolsProtocol):
    """Is one connection. Use `guarded_protocol`, which sets what connections of one listener
    share."""

    limits = ConnectionLimits()
    check: HeadCheck | None = None
    front = HttpFront()
    open_connections = OpenConnections()

    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _refusal: HttpError | None = None
    _is_ending = False
    _is_in_line = False
    _address = ""
    _names: Collection[str] | None = None
    _is_plaintext = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        shared = self.open_connections
        self.flow = self._flow = HeldFlow(transport, self._wait_for_turn, shared.gone)
        self._gone = self.loop.create_future()
        self._held = RequestCutter(shared.reads)
        self._framing = BodyFraming(self.limits.max_header_bytes)
        self._send_clock = SendClock(transport, self.limits.send_timeout_s)
        self._is_plaintext = transport.get_extra_info("sslcontext") is None
        self._names = certificate_names(transport.get_extra_info("peercert"))
        self._address = self.client[0] if self.client else ""
        shared.by_address[self._address] += 1
        if 0 < self.limits.max_per_address < shared.by_address[self._address]:
            transport.abort()
            return
        self._expect_head()
        if self.check is not None and self.check.asks_for_key:
            self.open_connections.unknown[self] = self.loop.time()
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._send_clock.stop()
        self._tell_answer()
        self._held.drop()
        self._gone.set_result(None)
        by_address = self.open_connections.by_address
        by_address[self._address] -= 1
        if not by_address[self._address]:
            del by_address[self._address]
        self.open_connections.unknown.pop(self, None)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._flow.end()
        if self.cycle is not None:
            detach(self.cycle, self.transport)
            self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        turns = self.open_connections.turns
        if self._is_ending or self.transport.is_closing():
            self._flow.drain_in_turn(turns)
            return
        if self._awaits_answer() and not data.strip(b"\r\n"):
            return  # Some clients end a body with a line of its own, and it is not read for long.
        was_held = bool(self._held)
        self._held.add(data)
        if was_held:
            return
        if not self._may_parse() or turns.may_begin(is_first=not self._is_answering()):
            self._parse_on()
        else:
            self._flow.hold()
            self._wait_for_turn()

    def _parse_on(self) -> None:
        """Parses a piece of what is here, unless a request waits for its answer: nothing behind
        that one is looked at, and it is dropped when the connection ends."""
        self._is_in_line = False
        if self._is_ending or self.transport.is_closing():
            self._held.drop()
            return
        if self._may_parse():
            self._parse_piece(self._held.next_piece())
        if not self._held:
            self._flow.release()
            return
        self._flow.hold()
        if self._may_parse():
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        if self._is_in_line or not self._held:
            return
        self._is_in_line = True
        self.open_connections.turns.wait(self._parse_on, is_first=not self._is_answering())

    def _may_parse(self) -> bool:
        return not self._awaits_answer() and not self._flow.is_full

    def _awaits_answer(self) -> bool:
        """Returns whether a whole request is here and its answer is not."""
        return self._is_answering() and not self.cycle.more_body

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse_piece(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if not self._is_answering():
            self._expect_head()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or BadHead("this is not a valid HTTP/1.1 request"))
            return
        if self._head_timer is not None and not self._is_ending:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refuse(self._too_large())

    def _parse(self, data: bytes) -> None:
        """Parses requests. One that offers another protocol, which nothing here speaks, is answered
        as it is."""
        while data and not self._is_ending:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if has_body(self.headers):
                    self.parser = parser_of_body(self, self.headers)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._framing.begin_head()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header without spaces behind its value, which the parser leaves there."""
        if not self._framing.has_begun:
            super().on_header(name, value.rstrip(b" "))
        else:
            self._raise(self._framing.add_trailer(len(name) + len(value) + 4))

    def on_chunk_header(self) -> None:
        self._raise(self._framing.add_chunk())

    def on_body(self, body: bytes) -> None:
        self._framing.add_body(len(body))
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._raise(self._judge_head() or self._judge_caller())
        super().on_headers_complete()
        length = self._held.body_bytes = length_of_body(self.headers)
        if length > FREE_BYTES:
            self._flow.pause_reading()  # Until the application has room for it.
        self._framing.begin_body()
        self.cycle.transport = cast("asyncio.Transport", AnswerTransport(self))
        if self.parser.get_http_version() == "1.0":
            send_without_chunks(self.cycle)
        self.scope["state"][GONE] = self._gone
        self.scope["state"][WRITE_DIRECTLY] = partial(write_directly, self.cycle)

    def on_message_complete(self) -> None:
        """Ends a request, unless it has offered another protocol and its body is to come."""
        if not (self.parser.should_upgrade() and has_body(self.headers)):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        if cycle.more_body and cycle.response_complete:
            self.end_gently()
        cut_loops(cycle)
        super().on_response_complete()
        self._wait_for_turn()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_clock.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_clock.stop()
        if self.transport.is_closing():
            self._send_clock.start()

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # One of TLS that is closed twice is never cut.
            super().shutdown()
        if self.transport.is_closing():
            self._send_clock.start()

    def close(self) -> None:
        """Ends the connection as soon as the client has read what it was sent. Idempotent."""
        if not self.transport.is_closing():
            self.transport.close()
        self._send_clock.start()

    def end_gently(self) -> None:
        """Ends the connection when the client has had a moment to read; what it still sends is
        thrown away."""
        if self._is_ending:
            return
        self._is_ending = True
        self._stop_head_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._held.drop()
        self._flow.release()
        self.flow.resume_reading()
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _make_room(self) -> None:
        unknown = self.open_connections.unknown
        oldest = next(iter(unknown))
        is_over = 0 < self.limits.max_without_key < len(unknown)
        if is_over and unknown[oldest] + _FIRST_WORDS_S <= self.loop.time():
            del unknown[oldest]
            oldest.transport.abort()

    def _judge_head(self) -> HttpError | None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            return self._too_large()
        return fault_of(self.headers, self.parser.get_http_version())

    def _judge_caller(self) -> HttpError | None:
        """Lets the check judge. Only a path that is written plainly is open to all."""
        if self.check is None:
            return None
        head = RequestHead(
            method=self.parser.get_method().decode("latin-1"),
            path=self._path,
            headers=headers_of(self.headers),
            names=self._names,
            is_plaintext=self._is_plaintext,
        )
        if self.front.is_preflight(head.method, head.headers):
            return None
        try:
            caller = self.check.admit(head)
        except HttpError as error:
            return error
        if caller is not None:
            self.open_connections.unknown.pop(self, None)
            self.scope["state"][CALLER] = caller
        return None

    @property
    def _path(self) -> str:
        """Returns the path below the root, as it was written and as far as it is here."""
        url: bytes = getattr(self, "url", b"")
        return self.front.inner_path(url.partition(b"?")[0].decode("latin-1"))

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"request line and headers are larger than {self.limits.max_header_bytes} bytes"
        )

    def _expect_head(self) -> None:
        if self._head_timer is None:
            timeout_s = self.limits.header_timeout_s
            self._head_timer = self.loop.call_later(timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        """Ends the wait. If this process was held up meanwhile, what the client has sent is not
        read yet: then it waits once more, for as long as that was."""
        assert self._head_timer is not None
        late_s = self.loop.time() - self._head_timer.when()
        if late_s > HELD_UP_S:
            more_s = min(late_s, self.limits.header_timeout_s)
            self._head_timer = self.loop.call_later(more_s, self._end_wait)
        else:
            self._end_wait()

    def _end_wait(self) -> None:
        """Ends a connection that takes too long. A client that has sent nothing at all gets no
        answer either."""
        self._head_timer = None
        if self._num_head_bytes:
            self._refuse(RequestTimeout("the request's headers did not arrive in time"))
        else:
            self.transport.abort()

    def _raise(self, error: HttpError | None) -> None:
        """Ends what the parser does, which then raises an error of its own."""
        if error is not None:
            self._refusal = error
            raise StopParsing

    def _refuse(self, error: HttpError) -> None:
        self._stop_head_timer()
        self._refusal = None
        is_begun = self._is_answering() and self.cycle.response_started
        self._tell_answer()
        if is_begun:
            self._is_ending = True
            self.close()
            return
        given = headers_of(self.headers or ())
        answer = refusal(error, self._path, given, self.front.cors_headers(given))
        self.transport.write(answer)
        self.end_gently()

    def _tell_answer(self) -> None:
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def guarded_protocol(
    limits: ConnectionLimits, check: HeadCheck | None = None, front: HttpFront | None = None
) -> type[asyncio.Protocol]:
    """Returns the protocol of one listener."""
    kind = guarded_class(limits, check, front)
    return bounded(kind, kind.open_connections.reads)


def guarded_class(
    limits: ConnectionLimits, check: HeadCheck | None = None, front: HttpFront | None = None
) -> type[GuardedProtocol]:
    """Returns `GuardedProtocol` with what connections of one listener share."""
    shared: dict[str, object] = {"limits": limits, "check": check, "front": front or HttpFront()}
    shared |= {"open_connections": OpenConnections()}
    return type("GuardedProtocol", (GuardedProtocol,), shared)
