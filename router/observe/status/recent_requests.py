"""Keeps the records of requests that are open, and of the last that have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from router.observe.status.recent_figures import RecentFigures
from router.observe.status.session_table import SessionTable
from router.request.request_history import RequestHistory
from router.request.trace import RequestTrace

KEPT = 200


class RecentRequests:
    """Holds the records. `num_ended` numbers those that have ended: the last of `ended` has it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.figures = RecentFigures(clock)
        self.sessions = SessionTable()
        self.ended: deque[RequestHistory] = deque(maxlen=KEPT)
        self.num_ended = 0
        self._open: dict[RequestHistory, None] = {}

    def begin(self, trace: RequestTrace, tenant: str) -> RequestHistory:
        record = RequestHistory(trace, self.figures.gap, tenant)
        self._open[record] = None
        return record

    def end(self, record: RequestHistory, status: int) -> None:
        """Records that a request has ended, for its client with `status`."""
        del self._open[record]
        record.ended_at = time.monotonic()
        record.status = status
        record.ended.set()
        self.figures.ended(record)
        self.sessions.note(record)
        self.ended.append(record)
        self.num_ended += 1

    @property
    def num_open(self) -> int:
        return len(self._open)

    def all_open(self) -> list[RequestHistory]:
        return list(self._open)

    def newest_open(self, count: int) -> Iterator[RequestHistory]:
        return islice(reversed(self._open), count)
