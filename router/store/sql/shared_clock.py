"""Gives the time that all routers of one database agree on: one judges by it when the lease of
another has run out.

SQLite is for one router, and has this host's time. PostgreSQL's own time is asked for before the
first transaction, and again every minute. By clocks of their hosts, a router that is an hour ahead
of the others would take their work at once, and its own would stand for an hour after its death.
"""

from __future__ import annotations

import math
import time

from sqlalchemy import text
from sqlalchemy.engine import Connection

_LOOK_S = 60.0


class SharedClock:
    """Returns Unix seconds when called. A step of the host's clock moves it only where it is this
    host's alone."""

    def __init__(self, *, is_shared: bool) -> None:
        self._due_at = -math.inf if is_shared else math.inf
        self._ahead_of_monotonic: float | None = None

    def __call__(self) -> float:
        if self._ahead_of_monotonic is None:
            return time.time()
        return self._ahead_of_monotonic + time.monotonic()

    @property
    def is_due(self) -> bool:
        """Returns whether the database is to be asked."""
        return time.monotonic() >= self._due_at

    def look(self, connection: Connection) -> None:
        """Asks the database. Until it has answered, all others ask it as well: none goes on by the
        host's time."""
        began = time.monotonic()
        query = text("SELECT extract(epoch FROM clock_timestamp())")
        found = float(connection.execute(query).scalar_one())
        ended = time.monotonic()
        self._ahead_of_monotonic = found - (began + ended) / 2
        self._due_at = ended + _LOOK_S
