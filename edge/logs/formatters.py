"""Writes log lines: for people, or a JSON object each for whatever collects them.

    {"time": "2026-11-22T13:08:44.123Z", "level": "info", "logger": "router.relay.forward",
     "process": "router", "message": "...", "request_id": "...", "trace_id": "...", "stack": "..."}

`request_id` and `trace_id` are there where the line belongs to a request (`current_trace`), `stack`
where an error does. Calls with `extra=with_fields(...)` add fields of their own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from edge.tracing.context import current_trace

_FIELDS = "tandem_fields"

Field = str | int | float


def with_fields(**fields: Field) -> dict[str, dict[str, Field]]:
    """Returns the `extra` of a log call."""
    return {_FIELDS: fields}


def _fields_of(record: logging.LogRecord) -> Mapping[str, Field]:
    found: Mapping[str, Field] = getattr(record, _FIELDS, {})
    return found


class TextFormatter(logging.Formatter):
    """Writes for people. `process` names a process that is one of several of its service."""

    def __init__(self, process: str = "") -> None:
        # A percent sign in the name of a process is one of the text.
        named = f"{process}:".replace("%", "%%") if process else "%(name)s:"
        super().__init__(f"%(asctime)s %(levelname)s {named} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = dict(_fields_of(record))
        trace = current_trace.get()
        if fields and trace is not None and trace.request_id:
            fields["request_id"] = trace.request_id
        told = "".join(f" {name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + told


class JsonFormatter(logging.Formatter):
    """Writes one object a line, in ASCII. `process` says which process of a service it is."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if (trace := current_trace.get()) is not None:
            line["request_id"] = trace.request_id
            line["trace_id"] = trace.trace_id
        line |= _fields_of(record)
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        elif record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)
