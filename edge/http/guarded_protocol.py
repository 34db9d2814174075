"""HTTP/1.1 connections of clients, with bounds that uvicorn itself does not have.

1. connected     from here on the head of a request has `header_timeout_s` to arrive complete,
                 however its bytes trickle; the same at the first byte of each further request
2. head complete the clock stops. Repeated `Host`, lengths that contradict each other and heads
                 beyond `max_header_bytes` are refused before anything is routed by them
3. body          read by whoever serves the request, with a clock of its own
-  refused       the answer is sent, then what still comes is thrown away for a moment: closing at
                 once would reset the connection, and the client would lose the answer. In the midst
                 of another answer it would be taken for a part of that one: then it is only closed
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.http.errors import BadHead, HeadTooLarge, HttpError, RequestTimeout

logger = logging.getLogger(__name__)

_LINGER_S = 1.0
_ONCE = (b"host", b"content-length", b"transfer-encoding", b"authorization")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`max_per_address` 0: any number of connections from one address."""

    header_timeout_s: float = 10.0
    max_header_bytes: int = 16 << 10
    max_per_address: int = 0
    open_by_address: Counter[str] = field(default_factory=Counter)


class GuardedProtocol(HttpToolsProtocol):
    limits = ConnectionLimits()

    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _refusal: HttpError | None = None
    _is_refused = False
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        open_by_address = self.limits.open_by_address
        open_by_address[self._address] += 1
        if 0 < self.limits.max_per_address < open_by_address[self._address]:
            transport.abort()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        open_by_address = self.limits.open_by_address
        open_by_address[self._address] -= 1
        if not open_by_address[self._address]:
            del open_by_address[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_timer is not None and not self._is_refused:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._refusal = self._judge_head()
        if self._refusal is not None:
            raise self._refusal
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Whatever the parser does not like, as an error object."""
        self._refuse(self._refusal or BadHead("This is not a valid HTTP/1.1 request."))

    def _judge_head(self) -> HttpError | None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            return self._too_large()
        names = [name for name, _ in self.headers]
        repeated = [name.decode() for name in _ONCE if names.count(name) > 1]
        if repeated:
            return BadHead(f"The header {repeated[0]} is given more than once.")
        if b"transfer-encoding" in names and b"content-length" in names:
            return BadHead("Content-Length and Transfer-Encoding exclude each other.")
        return None

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"Request line and headers are larger than {self.limits.max_header_bytes} bytes."
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
        """Who has sent nothing at all gets no answer either."""
        self._head_timer = None
        if self._num_head_bytes:
            self._refuse(RequestTimeout("The request's headers did not arrive in time."))
        else:
            self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        self._is_refused = True
        self._stop_head_timer()
        if self._cut_open_answer():
            self.transport.close()
            return
        body = error.body()
        head = (
            f"HTTP/1.1 {int(error.status)} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _cut_open_answer(self) -> bool:
        """Whoever answers a request of this connection hears that its client has gone, and writes
        no more. Whether the client has got a part of that answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return cycle.response_started


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
