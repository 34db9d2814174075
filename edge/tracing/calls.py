"""Records the calls that a service makes for a request: a span each, whose child is the span of the
service that answers.

    router's request ◀── its call of a decode node ◀── the decode node's request
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from edge.tracing.context import TraceContext
from edge.tracing.span import Attributes, Span, SpanKind


@dataclass(slots=True)
class _Call:
    context: TraceContext
    node: str
    start: float
    end: float = 0.0
    error: str = ""


@dataclass(slots=True)
class TraceCalls:
    """Is filled while a request is served. `name` and `attributes` are those of all its calls."""

    name: str
    attributes: Attributes = field(default_factory=dict)
    _calls: list[_Call] = field(default_factory=list)

    def begin(self, trace: TraceContext, node: str) -> dict[str, str]:
        """Records a call of `node`, `host:port` and whatever follows a slash, which ends the one
        before. Returns its headers."""
        self.end()
        call = _Call(trace.sibling(), node, time.monotonic())
        self._calls.append(call)
        return call.context.child_headers()

    def end(self, error: str = "") -> None:
        """Records that the last call has ended; nothing where it had."""
        if self._calls and not self._calls[-1].end:
            call = self._calls[-1]
            call.end, call.error = time.monotonic(), error

    def spans(self, end: float) -> Iterator[Span]:
        """Yields them; a call that has not ended does so at `end`."""
        for call in self._calls:
            host, _, port = call.node.partition("/")[0].rpartition(":")
            attributes = {**self.attributes, "server.address": host.strip("[]")}
            if port.isdigit():
                attributes["server.port"] = int(port)
            if call.error:
                attributes["error.type"] = call.error
            until = call.end or max(end, call.start)
            yield Span(
                self.name, call.start, until, attributes, call.error,
                kind=SpanKind.CLIENT, span_id=call.context.span_id,
            )  # fmt: skip
