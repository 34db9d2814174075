"""Writes traces of requests, a line of JSON each, in the format of OpenTelemetry (OTLP/JSON).

The collector's `otlpjsonfile` receiver reads such files; so do people with `jq`. Each service of a
request writes its own line; the trace and the caller's span, which travel with the request, tie
them together. Spans say when something happened and how much it was, never what was asked or
answered.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.tracing.context import TraceContext

_INTERNAL, _SERVER = 1, 2


@dataclass(frozen=True, slots=True)
class Span:
    """Is one part of a request. `start` and `end` are CLOCK_MONOTONIC seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, str | int] = field(default_factory=dict)


class TraceFileError(Exception):
    """The trace file cannot be written. The message names it and says what to do."""


class TraceFile:
    """Appends to `path`. One service, one thread. What cannot be written ends nothing."""

    def __init__(self, path: Path, service: str, instance: str) -> None:
        """Opens the file. Raises `TraceFileError`."""
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise TraceFileError(
                f"the trace file {path} cannot be opened ({error.strerror}); make its folder, or "
                f"give another --trace-file"
            ) from None
        self._resource = _attributes({"service.name": service, "service.instance.id": instance})
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    @classmethod
    def open(cls, path: Path | None, service: str, instance: str) -> TraceFile | None:
        """Returns None where no traces are wanted. Raises `TraceFileError`."""
        return None if path is None else cls(path, service, instance)

    def write(self, trace: TraceContext, spans: Sequence[Span]) -> None:
        """Writes a line. The first span is the request, the others happened in it."""
        request, *parts = spans
        found = [self._span(trace, request, trace.span_id, trace.parent_id, _SERVER)]
        found += [
            self._span(trace, span, secrets.token_hex(8), trace.span_id, _INTERNAL)
            for span in parts
        ]
        scope = {"scope": {"name": "tandem"}, "spans": found}
        line = {
            "resourceSpans": [{"resource": {"attributes": self._resource}, "scopeSpans": [scope]}]
        }
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError:
            return

    def close(self) -> None:
        self._file.close()

    def _span(
        self, trace: TraceContext, span: Span, span_id: str, parent: str, kind: int
    ) -> dict[str, Any]:
        return {
            "traceId": trace.trace_id,
            "spanId": span_id,
            **({"parentSpanId": parent} if parent else {}),
            "name": span.name,
            "kind": kind,
            "startTimeUnixNano": self._unix_ns(span.start),
            "endTimeUnixNano": self._unix_ns(max(span.start, span.end)),
            "attributes": _attributes(span.attributes),
        }

    def _unix_ns(self, seconds: float) -> str:
        return str(self._epoch_ns + int(seconds * 1e9))


def _attributes(values: Mapping[str, str | int]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)},
        }
        for key, value in values.items()
    ]
