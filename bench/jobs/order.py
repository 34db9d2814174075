"""Chooses which job begins next, on which GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.jobs.plan import Job


@dataclass(frozen=True, slots=True)
class Busy:
    """GPUs that a job has, and for how many seconds more as far as known."""

    gpus: int
    left_s: float


def next_job(
    waiting: Sequence[Job],
    passed: set[str],
    num_gpus: int,
    busy: Sequence[Busy],
    left_s: float,
) -> Job | None:
    """Returns the first job that may begin now; None: one has to wait for those that run.

    In order, but for two things: whoever waits for another job lets others by; and where the first
    of all needs more GPUs than are free, one behind it takes a free one if it will be done when
    the GPUs of the first are.

    Args:
        passed: Names of the jobs that have passed.
        num_gpus: How many GPUs there are.
        left_s: The seconds in which jobs have to be done; those that take longer are left out.
    """
    free = num_gpus - sum(one.gpus for one in busy)
    window = math.inf
    for job in waiting:
        if not set(job.after) <= passed or job.takes_s > left_s:
            continue
        missing = held_by(job, num_gpus) - free
        if missing <= 0 and job.takes_s <= window:
            return job
        if missing > 0:
            window = min(window, _seconds_until(missing, busy))
    return None


def held_by(job: Job, num_gpus: int) -> int:
    """Returns how many GPUs nobody else may have meanwhile."""
    return num_gpus if job.alone else job.gpus


def _seconds_until(gpus: int, busy: Sequence[Busy]) -> float:
    """Returns the seconds until so many GPUs of those that are busy should be free."""
    for one in sorted(busy, key=lambda one: one.left_s):
        gpus -= one.gpus
        if gpus <= 0:
            return one.left_s
    return 0.0


def reason_to_leave_out(
    job: Job, states: Mapping[str, str], num_gpus: int, left_s: float
) -> str | None:
    """Returns why a job cannot begin any more; None: it can.

    Args:
        states: The state of each job by name.
        left_s: The seconds in which jobs have to be done.
    """
    missing = [name for name in job.after if states[name] in ("failed", "left out")]
    if missing:
        return f"needs {', '.join(missing)}"
    if job.gpus > num_gpus:
        return f"needs {job.gpus} GPUs"
    if job.takes_s > left_s:
        return "no time is left for it"
    return None
