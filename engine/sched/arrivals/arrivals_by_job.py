"""Keeps what sources share whose KV jobs of the host tier bring: which job brings it, how long it
has been waited for, and how much of it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.sched.arrivals.arrival import KVArrival

_LONGEST_LOOK_S = 1.0
"""Looks at what waits follow each other sooner, unless this process stands still."""


@dataclass(slots=True, eq=False)
class TierArrival(KVArrival):
    """KV that jobs bring.

    Attributes:
        job: The latest, which asks or loads.
        is_first: The request was not preempted before.
        began_at: CLOCK_MONOTONIC seconds at which the job began.
        waited_s: How long its jobs have been waited for, without what this process stood still.
    """

    job: int = -1
    is_first: bool = True
    began_at: float = 0.0
    waited_s: float = 0.0

    @property
    def stop(self) -> int:
        """Returns the number of leading tokens that have their KV once all is here."""
        return self.num_before + self.num_coming


_Arrival = TypeVar("_Arrival", bound=TierArrival)
_Answer = TypeVar("_Answer")


class ArrivalsByJob(Generic[_Arrival]):
    """The arrivals that wait for a job each, whatever becomes of their requests."""

    def __init__(self, what: str) -> None:
        """Calls a job `what` where it is left over."""
        self._what = what
        self._of_job: dict[int, _Arrival] = {}
        self._looked_at = time.monotonic()

    def __iter__(self) -> Iterator[_Arrival]:
        return iter(list(self._of_job.values()))

    def get(self, job: int) -> _Arrival | None:
        return self._of_job.get(job)

    def add(self, arrival: _Arrival, job: int) -> None:
        arrival.job, arrival.began_at = job, time.monotonic()
        self._of_job[job] = arrival

    def take(self, arrival: _Arrival) -> bool:
        """Forgets the arrival's job. Returns False for a job that is none of these."""
        return self._of_job.pop(arrival.job, None) is not None

    def ended(self, answers: Mapping[int, _Answer]) -> Iterator[tuple[_Arrival, _Answer]]:
        """Takes the arrivals whose jobs are among these, with what became of each."""
        for job, answer in answers.items():
            if (arrival := self._of_job.pop(job, None)) is not None:
                yield arrival, answer

    def overdue(
        self, limit_s: float, is_limited: Callable[[_Arrival], bool] = lambda arrival: True
    ) -> Iterable[_Arrival]:
        """Returns those that have waited for more than `limit_s`, of those that `is_limited` is
        true of. Looks follow each other, one before each step: time between two counts little,
        since the tier may have answered."""
        now = time.monotonic()
        waited_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        limited = [arrival for arrival in self if is_limited(arrival)]
        for arrival in limited:
            arrival.waited_s += waited_s
        return [arrival for arrival in limited if arrival.waited_s > limit_s]

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return [
            f"{self._what} {job} for request {arrival.request.request_id}"
            for job, arrival in self._of_job.items()
        ]


@dataclass(slots=True)
class TierCounters:
    """Counts since the start.

    Attributes:
        tokens: Tokens of prompts whose KV came.
        tokens_again: Those of them whose requests had been preempted, and looked up before.
        cheaper_to_compute: Prompts that computed what might have come.
    """

    tokens: int = 0
    tokens_again: int = 0
    cheaper_to_compute: int = 0

    def came(self, arrival: TierArrival) -> None:
        """Counts an arrival of which all is here."""
        self.tokens += arrival.num_coming
        self.tokens_again += 0 if arrival.is_first else arrival.num_coming
