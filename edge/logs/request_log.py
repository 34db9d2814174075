"""Logs a line for each finished request, if anything wants it, and gathers what is in it.

1. `begin`        the outermost part of a service, when a request comes
2. `note_facts`   each layer that knows something of it: tokens, times, nodes; never content
3. `end`          one line at info
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

from edge.logs.formatters import Field, with_fields

logger = logging.getLogger(__name__)

_facts: ContextVar[dict[str, Field] | None] = ContextVar("request_facts", default=None)


def note_facts(**facts: Field) -> None:
    """Adds to the line of the request that this task works for."""
    if (known := _facts.get()) is not None:
        known.update(facts)


class RequestLog:
    """Is the log of one service's requests."""

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on = is_on

    def begin(self) -> None:
        _facts.set({} if self.is_on else None)

    def end(self, what: str, **facts: Field) -> None:
        """Logs `what` ended, with all that is known."""
        if self.is_on:
            logger.info("%s", what, extra=with_fields(**facts, **(_facts.get() or {})))
