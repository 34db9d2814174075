"""Writes the trace of one request, as the router sees it.

    request  ├── queue ──┤──── first byte ────┤ ... the answer ...
             read, and waiting for its turn   from the placement until a node begins the answer

The spans of decode nodes are children of `request`, whichever of them gave the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge.tracing.context import TraceContext
from edge.tracing.file import Span, TraceFile


@dataclass(slots=True)
class RequestTrace:
    """Is filled while a request is answered. Times are CLOCK_MONOTONIC seconds, 0.0 for not yet.

    Attributes:
        decode_node: That began the answer.
    """

    context: TraceContext
    request_id: str
    started_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    answered_at: float = 0.0
    decode_node: str = ""

    @classmethod
    def begin(cls, headers: Mapping[str, str], request_id: str) -> RequestTrace:
        return cls(TraceContext.from_headers(headers), request_id)

    def write(self, traces: TraceFile, status: int) -> None:
        """Writes a request that has ended, for the client with `status`."""
        attributes: dict[str, str | int] = {"request_id": self.request_id, "status": status}
        if self.decode_node:
            attributes["decode_node"] = self.decode_node
        spans = [Span("request", self.started_at, time.monotonic(), attributes)]
        if self.admitted_at:
            spans.append(Span("queue", self.started_at, self.admitted_at))
        if self.answered_at:
            spans.append(Span("first byte", self.admitted_at, self.answered_at))
        traces.write(self.context, spans)
