"""Defines what can be wrong with where traces go. Messages say what to change."""

from __future__ import annotations

from pathlib import Path


class TracingError(Exception):
    """Traces cannot be written as asked."""


class TraceFileError(TracingError):
    """The trace file cannot be opened."""

    def __init__(self, path: Path, reason: str | None) -> None:
        super().__init__(
            f"the trace file {path} cannot be opened ({reason}); make its folder, or give another "
            "--trace-file"
        )


class OtlpError(TracingError):
    """Spans cannot be pushed to a collector as asked."""
