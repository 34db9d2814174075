"""Sends one answer to its client, and keeps a stream of events from silence.

1. waiting   nothing was sent: whatever goes wrong is an HTTP status
2. begun     by the answer, or for a stream that is wanted by the first keep-alive, when nothing
             came for `--sse-keepalive-s`: from now on an error is an event in the API's form
3. pauses    a keep-alive each: also while the prompt waits in the line, and while the answer moves
             to another node
4. ended

Keep-alives are the router's and not the nodes': until a node's own answer begins, another node may
be tried, and its head says what was computed where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from starlette.types import Send

from edge.http import headers as names
from edge.http.answers.event_writer import WriteDirectly
from edge.http.answers.heartbeats import EVENT_END, STREAM_HEADERS, Head, Heartbeats, Pulse
from edge.http.error_forms import ErrorForm
from edge.http.errors import HttpError, send_error
from edge.http.event_loop.limited_wait import within
from router.request.info import RequestInfo

Headers = list[tuple[bytes, bytes]]

_STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
_TICK_S = 0.25
_FIRST_ERROR = 400
_OK = 200


class AnswerBroken(Exception):
    """An answer ended early, after part of it had gone to the client."""


@dataclass(slots=True)
class Client:
    """Takes the answer to one request. `pulse` is that of a stream; without one nothing is sent
    before the answer."""

    send: Send
    info: RequestInfo
    send_timeout_s: float
    write_directly: WriteDirectly | None = None
    load: Callable[[], Mapping[str, str]] = dict
    """Returns headers that tell the load of this service, if the client asks for it."""
    pulse: Pulse | None = None
    head: Head = field(init=False)
    _late_status: int = 0
    """Status of an answer that is no stream of events, and came after a stream had begun."""
    _late_body: bytes = b""

    def __post_init__(self) -> None:
        self.head = Head(self.send)

    async def begin(self) -> None:
        """Begins the stream before its answer."""
        named = {names.REQUEST_ID: self.info.request_id}
        if self.info.model:
            named[names.MODEL_VERSION] = names.encode_name(self.info.model)
        await self.head.send(_OK, STREAM_HEADERS | named | dict(self.load()))

    async def start(self, status: int, headers: Headers) -> None:
        is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        added = {names.REQUEST_ID: self.info.request_id, **self.load()}
        headers = [*headers, *((name.encode(), value.encode()) for name, value in added.items())]
        if is_stream:
            known = dict(headers)
            headers += [pair for pair in _STREAM_HEADERS if pair[0] not in known]
        with self._sending():
            if await self.head.take():
                start = {"type": "http.response.start", "status": status, "headers": headers}
                await self.send(start)
            elif not is_stream or status >= _FIRST_ERROR:
                self._late_status = status

    def write_now(self, data: bytes, now: float) -> bool:
        """Writes a part of an answer that has begun, at monotonic seconds. Returns False, and has
        written nothing, where `write` is needed."""
        write = self.write_directly
        if self._late_status or write is None or not write(data):
            return False
        if self.pulse is not None:
            self.pulse.sent(data, now)
        return True

    async def write(self, data: bytes, *, more: bool) -> None:
        """Raises `AnswerBroken` when the client takes nothing for long."""
        if self._late_status:
            self._late_body += data
            if more:
                return
            data = self._late_event()
        with self._sending(data):
            await self._write({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: HttpError) -> None:
        """Answers with an error of the router's own. No part of the answer may have been sent."""
        with self._sending():
            if await self.head.take():
                await send_error(self.send, error, self.info.request_id)
                return
        self._late_status = int(error.status)
        await self.write(error.body(), more=False)

    def _sending(self, data: bytes = EVENT_END) -> AbstractContextManager[None]:
        return nullcontext() if self.pulse is None else self.pulse.sending(data)

    async def _write(self, message: dict[str, object]) -> None:
        try:
            await within(self.send_timeout_s, self.send(message))
        except TimeoutError:
            raise AnswerBroken(f"{self.info.request_id}: the client does not read") from None

    def _late_event(self) -> bytes:
        # Line ends are white space in JSON, and would end the event's line.
        body = b" ".join(self._late_body.splitlines())
        if self._late_status < _FIRST_ERROR:
            return b"data: " + body + b"\n\n"
        form = ErrorForm.of_path(self.info.path)
        return form.event(form.translate(body, self._late_status))


@dataclass(slots=True, kw_only=True)
class Clients:
    """Makes them. `keepalive_s` is the longest silence of a stream, in seconds; 0: any."""

    send_timeout_s: float = 20.0
    keepalive_s: float = 0.0
    heartbeats: Heartbeats = field(default_factory=Heartbeats)

    @contextmanager
    def client(
        self, info: RequestInfo, send: Send, write_directly: WriteDirectly | None = None
    ) -> Iterator[Client]:
        """Is open until the answer to a request has ended."""
        client = Client(send, info, self.send_timeout_s, write_directly)
        if not (self.keepalive_s and info.is_stream):
            yield client
            return
        client.pulse = Pulse(send, interval_s=self.keepalive_s, begin=client.begin)
        try:
            with self.heartbeats.watch(client.pulse):
                yield client
        finally:
            client.pulse = None

    async def run(self) -> None:
        """Keeps streams alive until cancelled."""
        if self.keepalive_s:
            await self.heartbeats.run(min(_TICK_S, self.keepalive_s / 10))
