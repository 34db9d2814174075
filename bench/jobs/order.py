"""Chooses which job begins next, on which GPUs.

Each place is for one job. Places of one GPU have its number in common: what runs there at once
shares it. A place without a GPU is `cpu`, and shares with none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.jobs.plan import Job


@dataclass(frozen=True, slots=True)
class Busy:
    """Places that a job has, and for how many seconds more as far as known."""

    places: Sequence[str]
    left_s: float


def next_job(
    waiting: Sequence[Job],
    passed: set[str],
    places: Sequence[str],
    busy: Sequence[Busy],
    left_s: float,
) -> tuple[Job, list[str]] | None:
    """Returns the first job that may begin now, and its places; None: one has to wait for those
    that run.

    In order, but for two things: a job that waits for another lets others by; and where the first
    of all needs more places than are free, one behind it takes a free one if it will be done when
    the places of the first are.

    Args:
        passed: Names of the jobs that have passed.
        places: All places.
        left_s: The seconds in which jobs have to be done; those that take longer are left out.
    """
    free = list(places)
    for one in busy:
        for place in one.places:
            free.remove(place)
    window = math.inf
    for job in waiting:
        if not set(job.after) <= passed or job.takes_s > left_s:
            continue
        taken = _places_for(job, places, free)
        if taken and job.takes_s <= window:
            return job, taken
        if not taken:
            window = min(window, _seconds_until(job, places, free, busy))
    return None


def _places_for(job: Job, places: Sequence[str], free: Sequence[str]) -> list[str]:
    """Returns the places that nothing else may have meanwhile, those of the job's own GPUs first;
    empty: they are not free.

    Its GPUs differ, and are those on which the fewest others run.
    """
    own = _different(free, places)[: job.gpus]
    if len(own) < job.gpus or (job.alone and len(free) < len(places)):
        return []
    if not job.alone:
        return own
    others = list(free)
    for place in own:
        others.remove(place)
    return own + others


def _different(free: Sequence[str], places: Sequence[str]) -> list[str]:
    """Returns one free place of each GPU, the one with the fewest jobs first, and all of `cpu`."""
    gpus = [place for place in dict.fromkeys(places) if place in free and place != "cpu"]
    gpus.sort(key=lambda gpu: places.count(gpu) - free.count(gpu))
    return gpus + [place for place in free if place == "cpu"]


def _seconds_until(
    job: Job, places: Sequence[str], free: Sequence[str], busy: Sequence[Busy]
) -> float:
    """Returns the seconds until those that are busy should have left enough places for a job."""
    then = list(free)
    for one in sorted(busy, key=lambda one: one.left_s):
        then += one.places
        if _places_for(job, places, then):
            return one.left_s
    return 0.0


def reason_to_leave_out(
    job: Job, states: Mapping[str, str], places: Sequence[str], left_s: float
) -> str | None:
    """Returns why a job cannot begin any more; None: it can.

    Args:
        states: The state of each job by name.
        places: All places.
        left_s: The seconds in which jobs have to be done.
    """
    missing = [name for name in job.after if states[name] in ("failed", "left out")]
    if missing:
        return f"needs {', '.join(missing)}"
    if job.gpus > len(_different(places, places)):
        return f"needs {job.gpus} GPUs"
    if job.takes_s > left_s:
        return "no time is left for it"
    return None
