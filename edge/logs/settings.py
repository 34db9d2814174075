"""Defines once, for all services, what they log."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import BaseModel, Field

from edge.logs.setup import LogFormat, LogStyle


class LogSettings(BaseModel):
    """See docs/monitoring.md."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Level of the log, on standard error; debug also logs each placement of a "
        "router. Request content is never logged.",
    )
    log_format: LogFormat = Field(
        default="text",
        description="text: lines for people. json: an object each, with request_id and trace_id.",
    )
    log_requests: bool = Field(
        default=False,
        description="Log a line for each finished request: times, tokens, how it ended; never "
        "what was asked or answered.",
    )

    def log_style(self) -> LogStyle:
        return LogStyle(logging.getLevelNamesMapping()[self.log_level.upper()], self.log_format)
