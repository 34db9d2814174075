"""Writes the traces of one service: to a file, to a collector, to both, or nowhere.

service ──▶ Tracer.write ──┬──▶ TraceFile    every request
                           └──▶ OtlpExport   those whose trace is sampled
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edge.tracing.context import TraceContext
from edge.tracing.environment import tracing_environment
from edge.tracing.errors import OtlpError
from edge.tracing.export.file import TraceFile
from edge.tracing.export.otlp_endpoint import OtlpEndpoint
from edge.tracing.export.resource import resource_attributes
from edge.tracing.settings import TraceSettings
from edge.tracing.span import RecordedSpan, Span, SpanKind

if TYPE_CHECKING:
    from edge.tracing.export.otlp_export import OtlpExport

logger = logging.getLogger(__name__)

REQUEST_ID_ATTRIBUTE = "gen_ai.request.id"
"""vLLM's name; on every span."""


class Tracer:
    """Is the end of the line for spans. One service, one thread. `close` at the end."""

    def __init__(self, file: TraceFile | None = None, export: OtlpExport | None = None) -> None:
        self._file = file
        self._export = export
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    @classmethod
    def open(cls, settings: TraceSettings, service: str, instance: str) -> Tracer:
        """Opens what the settings and the environment ask for. Raises `TraceFileError`,
        `OtlpError`."""
        environ = tracing_environment()
        resource = resource_attributes(service, instance, environ)
        file = None
        if settings.trace_file is not None:
            file = TraceFile(
                settings.trace_file,
                resource,
                settings.trace_file_max_bytes,
                settings.trace_file_backups,
            )
        endpoint = OtlpEndpoint.find(settings.otlp_traces_endpoint, environ)
        return cls(file, None if endpoint is None else _export(endpoint, resource))

    def wants(self, trace: TraceContext | None) -> bool:
        """Returns whether something reads the spans of this trace."""
        if trace is None:
            return False
        return self._file is not None or (self._export is not None and trace.is_sampled)

    def write(self, trace: TraceContext | None, spans: Sequence[Span]) -> None:
        """Writes what a service did for a request. The first span is the whole of it, the others
        happened in it. Never waits, never raises for a file or collector that fails."""
        if trace is None or not self.wants(trace):
            return
        recorded = [self._recorded(trace, span, is_first=i == 0) for i, span in enumerate(spans)]
        if self._file is not None:
            self._file.write(recorded)
        if self._export is not None and trace.is_sampled:
            self._export.write(recorded)

    def counts(self) -> dict[str, int]:
        """Returns spans by what became of them: `exported`, or why they were dropped."""
        file, export = self._file, self._export
        return {
            "exported": export.num_exported if export else 0,
            "queue_full": export.num_overflown if export else 0,
            "export_failed": export.num_failed if export else 0,
            "file": file.num_dropped if file else 0,
        }

    def close(self) -> None:
        """Takes seconds at most, also where the collector is down."""
        if self._export is not None:
            self._export.close()
        if self._file is not None:
            self._file.close()

    def _recorded(self, trace: TraceContext, span: Span, *, is_first: bool) -> RecordedSpan:
        named = {REQUEST_ID_ATTRIBUTE: trace.request_id} if trace.request_id else {}
        return RecordedSpan(
            span.name,
            trace.trace_id,
            trace.span_id if is_first else span.span_id or secrets.token_hex(8),
            trace.parent_id if is_first else trace.span_id,
            SpanKind.SERVER if is_first else span.kind,
            self._unix_ns(span.start),
            self._unix_ns(max(span.start, span.end)),
            {**named, **span.attributes},
            span.error,
            trace.state,
        )

    def _unix_ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def _export(endpoint: OtlpEndpoint, resource: Mapping[str, str]) -> OtlpExport | None:
    """Starts the export. Where only the environment names a collector, which whole clusters may do,
    what is missing or wrong is no reason not to serve. Raises `OtlpError`."""
    try:
        from edge.tracing.export.otlp_export import OtlpExport

        return OtlpExport(endpoint, resource)
    except ImportError as error:
        reason = f"{error}: pip install 'tandem[otlp]'"
    except ValueError as error:
        reason = f"a variable OTEL_... is wrong: {error}"
    problem = f"traces cannot be pushed to {endpoint.url}: {reason}"
    if endpoint.is_explicit:
        raise OtlpError(problem)
    logger.warning("%s", problem)
    return None
