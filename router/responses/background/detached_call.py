"""Asks the router's own API for an answer that no connection waits for.

The request takes the way of all others: admission, placement, moves between nodes. It ends with its
last event, with a refusal, or when the task that asked is cancelled, which ends the work on the
nodes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.types import ASGIApp, Message, Scope, Send

from edge.http.errors import ErrorBody
from edge.tracing.context import TraceContext, current_trace
from router.request.tenants import Tenant
from router.responses.kept_answer import data_of, last_event

PATH = "/v1/responses"
_OK = 200
_END = b"\n\n"
_decode_error = msgspec.json.Decoder(ErrorBody).decode


@dataclass(slots=True)
class DetachedAnswer:
    """Is what came. `last` is the stream's last event; without it `status` and `message` say what
    went wrong, and `retry_after_s` when to come back."""

    on_events: Callable[[list[bytes]], None]
    status: int = 0
    last: bytes = b""
    message: str = "the answer broke off"
    retry_after_s: float = 0.0
    _body: bytearray = field(default_factory=bytearray)

    async def send(self, message: Message) -> None:
        """Takes what the API sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message["headers"]:
                if name.lower() == b"retry-after":
                    self.retry_after_s = float(value)
        elif self.status == _OK:
            self._take_events(message.get("body", b""))
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self._read_error(bytes(self._body))

    def _take_events(self, data: bytes) -> None:
        before, last = last_event(data)
        events = [text + _END for text in before.split(_END) if text and text[:1] != b":"]
        told = [event for event in events if event.startswith(b"event: ")]
        for event in events[len(told) :]:
            self._read_error(data_of(event))
        if told:
            self.on_events(told)
        self.last = last or self.last

    def _read_error(self, body: bytes) -> None:
        try:
            self.message = _decode_error(body).error.message
        except msgspec.MsgspecError:
            self.message = f"status {self.status}"


async def ask(
    api: ASGIApp,
    send: Send,
    body: bytes,
    headers: Mapping[str, str],
    tenant: Tenant,
    kept: str,
    *,
    path: str = PATH,
    is_idle: bool = False,
) -> None:
    """Has a body answered to `send`; `kept` is what a node gets of the response. `is_idle`: only
    with capacity that nothing else uses."""
    name = uuid.uuid4().hex
    trace = TraceContext.from_headers(headers, name)
    current_trace.set(trace)
    known = {"content-type": "application/json", **headers}
    state = {
        "request_id": name,
        "trace": trace,
        "tenant": tenant,
        "kept": kept,
        "is_idle": is_idle,
    }
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in known.items()],
        "state": state,
    }
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()
        raise AssertionError

    await api(scope, receive, send)
