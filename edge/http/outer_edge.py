"""Is the outermost part of an HTTP application: every request passes here first, every answer last.

- Every answer has an `x-request-id`: the client's, if it is a plain one, else a new one.
- Every request has a trace: the caller's, or one that begins here. Log lines read it too.
- A line in the log tells of each request, if it is wanted (`edge.logs.request_log`).
- Paths lose what a proxy in front of us has left on, and pages of other sites learn whether they
  may read the answer; what they may not send is refused (`edge.http.front`).
- Clients connect anew where their connection has no future. An answer that begins before its
  request has arrived says so, because the rest of the request will never be read. And while a
  service drains every answer does: the next connection then goes to another one, and none is cut
  when this one ends.
- A request that is cancelled because its server stops gets an error that says so
  (`edge.http.answers.stopped_answer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.http import headers as names
from edge.http.answers.stopped_answer import StoppedAnswers
from edge.http.connection.client_connection import request_headers, request_id
from edge.http.errors import OriginRefused, send_error
from edge.http.front import HttpFront
from edge.http.request_head import READY_PATHS
from edge.logs.request_log import RequestLog
from edge.tracing.context import Sampler, TraceContext, current_trace, sample_all

_REQUEST_ID = names.REQUEST_ID.encode()
_PROBES = "/health", *READY_PATHS, "/ping", "/metrics"
"""Paths whose requests nothing wants in a log."""
_LONGEST_PATH = 128
_OTHER_SITE = (
    "a page of another site sent this, which is not among --allowed-origins; programs send no "
    "Origin header"
)
_CLIENT_LEFT = 499
"""Never sent; logged for requests whose client left before the answer."""


class OuterEdge:
    """Wraps an ASGI application. The request's id is at `scope["state"]["request_id"]`, its trace
    at `["trace"]`; `sampler` judges traces that begin here."""

    def __init__(
        self,
        app: ASGIApp,
        is_draining: Callable[[], bool],
        front: HttpFront | None = None,
        sampler: Sampler = sample_all,
        requests: RequestLog | None = None,
    ) -> None:
        self._app = StoppedAnswers(app)
        self._is_draining = is_draining
        self._front = front or HttpFront()
        self._sampler = sampler
        self._requests = requests or RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = request_headers(scope)
        name = request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = name
        state["trace"] = trace = TraceContext.from_headers(headers, name, self._sampler)
        current_trace.set(trace)
        self._requests.begin()
        began_at = time.monotonic()
        status = _CLIENT_LEFT
        scope["path"] = self._front.inner_path(scope["path"])
        is_whole = not _announces_body(scope)

        async def receive_watched() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole |= message["type"] == "http.request" and not message.get("more_body", False)
            return message

        async def send_outward(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = found = list(message.get("headers", ()))
                if all(header != _REQUEST_ID for header, _ in found):
                    found.append((_REQUEST_ID, name.encode()))
                found += _encoded(self._front.cors_headers(headers))
                if self._is_draining() or not is_whole:
                    found.append((b"connection", b"close"))
            await send(message)

        try:
            if self._front.is_preflight(scope["method"], headers):
                await self._answer_preflight(headers, send_outward)
            elif self._front.refuses(scope["method"], scope["path"], headers):
                await send_error(send_outward, OriginRefused(_OTHER_SITE))
            else:
                await self._app(scope, receive_watched, send_outward)
        finally:
            self._note_end(scope, status, time.monotonic() - began_at)

    def _note_end(self, scope: Scope, status: int, duration_s: float) -> None:
        if scope["path"] in _PROBES:
            return
        path = ascii(scope["path"])[1:-1][:_LONGEST_PATH]
        self._requests.end(
            f"{scope['method']} {path} {status}",
            status=status,
            path=path,
            duration_s=round(duration_s, 6),
        )

    async def _answer_preflight(self, headers: Mapping[str, str], send: Send) -> None:
        if not self._front.allows(headers):
            await send_error(
                send, OriginRefused("pages of this origin are not among --allowed-origins")
            )
            return
        raw = _encoded(self._front.preflight_headers(headers))
        await send({"type": "http.response.start", "status": 204, "headers": raw})
        await send({"type": "http.response.body", "body": b""})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _announces_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
