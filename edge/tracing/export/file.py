"""Writes traces of requests, a line of JSON each, in the format of OpenTelemetry (OTLP/JSON).

The collector's `otlpjsonfile` receiver reads such files; so do people with `jq`. Each service of a
request writes its own line; the trace and the caller's span, which travel with the request, tie
them together.

A file that would grow beyond its limit becomes `PATH.1`, the one before it `PATH.2`, and so on; the
oldest is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.tracing.errors import TraceFileError
from edge.tracing.span import Attributes, AttributeValue, RecordedSpan

_ERROR = 2


class TraceFile:
    """Appends to `path`. One service, one thread. What cannot be written ends nothing."""

    def __init__(
        self, path: Path, resource: Mapping[str, str], max_bytes: int = 0, backups: int = 1
    ) -> None:
        """Opens the file. `max_bytes` 0: it grows without limit; else `backups` older files are
        kept. Raises `TraceFileError`."""
        self._path = path
        self._max_bytes = max_bytes
        self._backups = backups
        self._resource = _attributes(resource)
        self.num_dropped = 0
        """Spans that could not be written."""
        try:
            self._open()
        except OSError as error:
            raise TraceFileError(path, error.strerror) from None

    def write(self, spans: Sequence[RecordedSpan]) -> None:
        """Writes a line."""
        scope = {"scope": {"name": "tandem"}, "spans": [_json_span(span) for span in spans]}
        line = {
            "resourceSpans": [{"resource": {"attributes": self._resource}, "scopeSpans": [scope]}]
        }
        text = json.dumps(line, separators=(",", ":")) + "\n"
        try:
            if self._max_bytes and self._size and self._size + len(text) > self._max_bytes:
                self._rotate()
            self._file.write(text)
            self._size += len(text)
        except (OSError, ValueError):
            self.num_dropped += len(spans)

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="ascii", buffering=1)
        self._size = self._file.tell()

    def _rotate(self) -> None:
        """Begins a new file. Raises OSError; the next line tries again."""
        self._file.close()
        if not self._path.exists():  # It was moved, and no new one could be made.
            self._open()
            return
        try:
            for number in range(self._backups - 1, 0, -1):
                older = self._backup(number)
                if older.exists():
                    older.replace(self._backup(number + 1))
            if self._backups:
                self._path.replace(self._backup(1))
            else:
                self._path.unlink()
        finally:
            self._open()

    def _backup(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _json_span(span: RecordedSpan) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        **({"parentSpanId": span.parent_id} if span.parent_id else {}),
        **({"traceState": span.state} if span.state else {}),
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        **({"status": {"code": _ERROR, "message": span.error}} if span.error else {}),
    }


def _attributes(values: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [{"stringValue": item} for item in value]}}
