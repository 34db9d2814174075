"""Pushes spans to an OpenTelemetry collector, beside the event loop.

    write ──▶ queue, bounded ──▶ thread of the SDK: batches ──▶ collector (HTTP or gRPC)
                  └ full: the spans are dropped and counted      └ fails: so are those of the batch

A collector that is down, slow or wrong costs requests nothing: `write` never waits.

Imported only where an endpoint is set: it needs the packages of the extra `otlp`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace import SpanKind as OtlpKind
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from edge.tracing.export.otlp_endpoint import OtlpEndpoint
from edge.tracing.span import RecordedSpan, SpanKind

logger = logging.getLogger(__name__)

_CLOSE_S = 3.0
"""Seconds that the last spans have to leave when a service ends."""
_SCOPE = InstrumentationScope("tandem")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {kind: OtlpKind[kind.name] for kind in SpanKind}


class CountedExporter(SpanExporter):
    """Hands batches to another exporter, in the SDK's thread, and counts what became of them."""

    def __init__(self, inner: SpanExporter, url: str) -> None:
        self._inner = inner
        self._url = url
        self._is_failing = False
        self.num_exported = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception:
            logger.exception("the exporter of traces failed")
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
        else:
            self.num_failed += len(spans)
        self._tell(result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def _tell(self, is_failing: bool) -> None:
        """Logs a change, not every batch."""
        if is_failing and not self._is_failing:
            logger.warning(
                "the collector of traces at %s takes no spans: they are dropped, and counted in "
                "tandem_trace_spans_dropped_total; requests go on",
                self._url,
            )
        elif self._is_failing and not is_failing:
            logger.info("the collector of traces at %s takes spans again", self._url)
        self._is_failing = is_failing


class OtlpExport:
    """Exports the spans of one service. `close` at the end."""

    def __init__(self, endpoint: OtlpEndpoint, resource: Mapping[str, str]) -> None:
        """Starts the thread. Raises `ValueError` for variables of OpenTelemetry that are wrong."""
        # Every attempt to reach a collector that is down would be a line.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._resource = Resource.create(dict(resource))
        self._max_queue = endpoint.max_queue_size
        self._exporter = CountedExporter(_exporter(endpoint), endpoint.url)
        self._batches = BatchSpanProcessor(self._exporter, max_queue_size=self._max_queue)
        self._num_queued = 0
        """Spans that ever entered the queue."""
        self.num_overflown = 0
        """Spans that found the queue full."""

    @property
    def num_exported(self) -> int:
        return self._exporter.num_exported

    @property
    def num_failed(self) -> int:
        return self._exporter.num_failed

    def write(self, spans: Sequence[RecordedSpan]) -> None:
        """Queues the spans of one service of one request: all of them, or none."""
        left = self._num_queued - self._exporter.num_exported - self._exporter.num_failed
        if left + len(spans) > self._max_queue:
            self.num_overflown += len(spans)
            return
        self._num_queued += len(spans)
        for span in spans:
            self._batches.on_end(self._readable(span))

    def close(self) -> None:
        """Gives the last spans a moment to leave. A collector that is down delays no end."""
        ending = threading.Thread(target=self._batches.shutdown, daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    def _readable(self, span: RecordedSpan) -> ReadableSpan:
        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        return ReadableSpan(
            span.name,
            context=_context(span, span.span_id, is_remote=False),
            parent=(
                _context(span, span.parent_id, is_remote=span.kind is SpanKind.SERVER)
                if span.parent_id
                else None
            ),
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=_KINDS[span.kind],
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(span: RecordedSpan, span_id: str, *, is_remote: bool) -> SpanContext:
    state = TraceState.from_header([span.state]) if span.state else None
    return SpanContext(int(span.trace_id, 16), int(span_id, 16), is_remote, _SAMPLED, state)


def _exporter(endpoint: OtlpEndpoint) -> SpanExporter:
    """Returns the exporter of the endpoint's protocol. Certificates, headers, compression and
    timeout come from the variables of OpenTelemetry."""
    if endpoint.is_grpc:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint.url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(endpoint=endpoint.url)
