"""Defines once, for all services, where the traces of requests go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from edge.tracing.context import Sampler
from edge.tracing.environment import tracing_environment
from edge.tracing.errors import OtlpError, TraceFileError
from edge.tracing.export.otlp_endpoint import OtlpEndpoint
from edge.tracing.sampling import find_ratio, ratio_sampler


def _checked_endpoint(text: str) -> str:
    try:
        if text:
            OtlpEndpoint.find(text, tracing_environment())
    except OtlpError as error:
        raise ValueError(str(error)) from None
    return text


class TraceSettings(BaseModel):
    """See docs/monitoring.md."""

    trace_file: Path | None = Field(
        default=None,
        description="File to which the trace of every request is appended, a line of OTLP/JSON "
        "each: when each part happened, never what was asked or answered.",
    )
    trace_file_max_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Size at which --trace-file becomes FILE.1 and a new one begins. 0: no limit.",
    )
    trace_file_backups: int = Field(
        default=3, ge=0, description="Older files that are kept beside --trace-file."
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_checked_endpoint)] = Field(
        default="",
        description="OpenTelemetry collector to which spans of sampled traces are pushed: "
        "http://host:4318, or grpc://host:4317. Needs the extra `otlp`. The variables "
        "OTEL_EXPORTER_OTLP_* are honoured. Empty: what those name, else none.",
    )
    trace_sample_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Part of the traces that begin here that is sampled; a caller's traceparent "
        "decides for its own. Default: what OTEL_TRACES_SAMPLER says, else 1.",
    )

    def check_trace_file(self) -> None:
        """Raises `TraceFileError` where the file could not be opened, and makes none."""
        if self.trace_file is not None and not self.trace_file.parent.is_dir():
            raise TraceFileError(self.trace_file, os.strerror(errno.ENOENT))

    def sampler(self) -> Sampler:
        return ratio_sampler(find_ratio(self.trace_sample_ratio, tracing_environment()))
