"""Decides, step by step, how many tokens decoding rows compute, where steps differ in it.

    a step goes out     its rows compute what the step before decided, and draft for the next one
    its result comes    what it took, and which drafts were right, is learnt

Data-parallel groups run their steps together, so there is one decision for all of them, by the rows
of the group that had most in the step before. A group without a step in between takes part again
with what the others do.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from engine.sched.rows.draft_length import DraftLength


class DraftPlan(NamedTuple):
    """Says how many tokens each row that decodes computes, and how many are drafted for each row
    behind the step; `num_drafts` None: as many as may be."""

    query_len: int
    num_drafts: int | None = None


class AdaptiveDrafts:
    """Decides for the rows of one scheduler. `most`: see `DraftLength`."""

    def __init__(self, most: int) -> None:
        self._chooser = DraftLength(most)
        self._query_len = most

    def next_step(self, num_rows: int) -> DraftPlan:
        """Decides for a step that goes out, in which `num_rows` rows decode."""
        now, self._query_len = self._query_len, self._chooser.choose(num_rows)
        return DraftPlan(now, self._query_len - 1)

    def step_done(self, num_rows: int, query_len: int, seconds: float) -> None:
        """Learns from a step that did nothing but decode."""
        self._chooser.step_done(num_rows, query_len, seconds)

    def drafts_checked(self, counts: list[int], num_tokens: list[int]) -> None:
        """Learns from a step's drafts; see `DraftLength`."""
        self._chooser.drafts_checked(counts, num_tokens)


class _Issued(NamedTuple):
    at: float
    num_rows: int
    query_len: int


class SharedDrafts(AdaptiveDrafts):
    """Decides for all data-parallel groups at once. Each group asks and tells of its own rows."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._num_rows = 0
        self._decided: DraftPlan | None = None
        self._issued: deque[_Issued] = deque()
        self._last_result_at = 0.0

    def begin_step(self) -> None:
        """Begins the next step of all groups."""
        self._decided = None

    def next_step(self, num_rows: int) -> DraftPlan:
        """Returns the same to all groups that have a part of the step."""
        if self._decided is None:
            self._decided = super().next_step(self._num_rows)
        return self._decided

    def step_done(self, num_rows: int, query_len: int, seconds: float) -> None:
        """Learns nothing: one group does not know what the others did in that time."""

    def issued(self, num_rows: int, *, only_decodes: bool) -> DraftPlan:
        """Takes note of the step for which groups have asked, and returns what they got;
        `num_rows` decode in the group that has most."""
        assert self._decided is not None
        self._num_rows = num_rows
        learnt_of = num_rows if only_decodes else 0
        self._issued.append(_Issued(time.monotonic(), learnt_of, self._decided.query_len))
        return self._decided

    def retired(self) -> None:
        """Learns from the oldest step, whose results have come."""
        step, now = self._issued.popleft(), time.monotonic()
        if step.num_rows:
            seconds = now - max(step.at, self._last_result_at)
            super().step_done(step.num_rows, step.query_len, seconds)
        self._last_result_at = now
