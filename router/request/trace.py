"""Writes the trace of one request, as the router sees it.

    POST /v1/chat/completions  ├── queue ──┤──── first byte ────┤ ... the answer ...
                               read, and waiting for its turn   from the placement until a node
                                           ├── POST, a call of a decode node ──┤    begins it

Each decode node that was asked has a call of its own, whose child its own span is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from edge.tracing.calls import TraceCalls
from edge.tracing.context import TraceContext
from edge.tracing.span import AttributeValue, Span
from edge.tracing.tracer import Tracer

_FIRST_SERVER_ERROR = 500
_METHOD = "POST"


@dataclass(slots=True)
class RequestTrace:
    """Is filled while a request is answered. Times are CLOCK_MONOTONIC seconds, 0.0 for not yet.

    Attributes:
        read_at: All of the request was here.
        decode_node: That began the answer.
        num_moves: Times that another node went on with it.
        failure: Why the answer broke off after its first byte; empty: it did not.
        model: The model, whatever alias the client used, and its version; None before they are
            known.
    """

    context: TraceContext
    path: str
    started_at: float = field(default_factory=time.monotonic)
    read_at: float = 0.0
    admitted_at: float = 0.0
    answered_at: float = 0.0
    decode_node: str = ""
    num_moves: int = 0
    failure: str = ""
    model: tuple[str, str] | None = None
    calls: TraceCalls = field(
        default_factory=lambda: TraceCalls(_METHOD, {"http.request.method": _METHOD})
    )

    @property
    def request_id(self) -> str:
        return self.context.request_id

    def facts(self) -> dict[str, str | float]:
        """Returns what a line of the log tells: times in seconds."""
        found: dict[str, str | float] = {}
        if self.model is not None:
            found["model"] = self.model[0]
        if self.admitted_at:
            found["queue_s"] = round(self.admitted_at - self.started_at, 6)
        if self.answered_at:
            found["first_byte_s"] = round(self.answered_at - self.started_at, 6)
            found["decode_node"] = self.decode_node
        if self.num_moves:
            found["moves"] = self.num_moves
        if self.failure:
            found["error"] = self.failure
        return found

    def write(self, tracer: Tracer, status: int) -> None:
        """Writes a request that has ended, for the client with `status`."""
        if not tracer.wants(self.context):
            return
        attributes: dict[str, AttributeValue] = {
            "http.request.method": _METHOD,
            "http.route": self.path,
            "url.path": self.path,
            "http.response.status_code": status,
        }
        if self.decode_node:
            attributes["tandem.decode_node"] = self.decode_node
        if self.num_moves:
            attributes["tandem.moves"] = self.num_moves
        if self.model:
            attributes["gen_ai.request.model"], attributes["gen_ai.response.model"] = self.model
        error = self.failure or (f"status {status}" if status >= _FIRST_SERVER_ERROR else "")
        if error:
            attributes["error.type"] = "broken_answer" if self.failure else str(status)
        now = time.monotonic()
        spans = [Span(f"{_METHOD} {self.path}", self.started_at, now, attributes, error)]
        if self.admitted_at:
            spans.append(Span("queue", self.started_at, self.admitted_at))
        if self.answered_at:
            spans.append(Span("first byte", self.admitted_at, self.answered_at))
        tracer.write(self.context, [*spans, *self.calls.spans(now)])
