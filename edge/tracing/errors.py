"""Defines what can be wrong with where traces go. Messages say what to change."""

from __future__ import annotations


class TracingError(Exception):
    """Traces cannot be written as asked."""


class TraceFileError(TracingError):
    """The trace file cannot be opened."""


class OtlpError(TracingError):
    """Spans cannot be pushed to a collector as asked."""
