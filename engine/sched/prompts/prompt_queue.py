"""Waiting requests in the two lines of `PromptOrder`."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.config import SchedulingPolicy
from engine.contracts.request import Request
from engine.sched.prompts.prompt_order import Line
from engine.sched.request_queue import RequestQueue, SortKey


class PromptQueue(RequestQueue):
    """A queue whose requests leave by the line that has its turn. Under `priority`, a line is
    sorted by priority first; else those of the idle class come last.
    """

    def __init__(self, policy: SchedulingPolicy, judge: Callable[[Request], None]) -> None:
        """Takes what sets the work and the due time of a request that comes."""
        super().__init__(policy)
        self._judge = judge
        self._heaps = ([], [])

    def add(self, request: Request) -> None:
        self._judge(request)
        super().add(request)

    def _keys(self, request: Request) -> tuple[SortKey, ...]:
        priority, order = self.priority(request), request.arrival_order
        return (priority, request.prompt_work or 0.0, order), (priority, request.due_at, order)

    def priority(self, request: Request) -> int:
        return request.rank(self._policy)

    def turn_to(self, line: Line) -> None:
        """Lets requests leave by `line` from now on."""
        self._line = line

    @property
    def shortest(self) -> float:
        """Returns the least work of the requests that compute a prompt, of those of the highest
        priority; infinite: there is none."""
        work = self._first(Line.SHORTEST)[2].prompt_work if self else 0.0
        return work or math.inf

    @property
    def first_due(self) -> Request | None:
        """Returns the request that is due first."""
        return self._first(Line.DUE)[2] if self else None

    @property
    def first_due_at(self) -> float:
        first = self.first_due
        return math.inf if first is None else first.due_at
