"""Defines spans: what a service says of one part of a request, and what is written of it.

They say when something happened and how much it was, never what was asked or answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

AttributeValue = str | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


class SpanKind(IntEnum):
    """Names what a span is of a call, by the numbers of OTLP."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class Span:
    """Is one part of a request. `start` and `end` are CLOCK_MONOTONIC seconds. `error` says what
    failed; empty: nothing. `span_id` is there where others were given it; empty: a new one."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    kind: SpanKind = SpanKind.INTERNAL
    span_id: str = ""


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """Is a span with its place in the trace. Times are Unix nanoseconds, ids lower-case hex;
    `parent_id` is empty where the trace begins. `state` is the trace's W3C `tracestate`."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str = ""
    state: str = ""
