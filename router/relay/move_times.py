"""Measures how long the client of an answer that moves receives nothing, and what takes the time.

    last event ─ unnoticed ─▶ lost ─ placing ─▶ asked ─ beginning ─▶ accepted ─ catching up ─▶ event

unnoticed     the node was gone, or hung, and the router did not know
placing       no other node could take the answer, or those that were asked did not
beginning     the next node was asked: until its head is here
catching up   it computes the KV of prompt and tokens, and samples the next one
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import Histogram

PHASES = ("unnoticed", "placing", "beginning", "catching_up")


@dataclass(slots=True)
class MoveTimes:
    """Holds the times of one move, in monotonic seconds; each is set when it happens."""

    last_event_at: float
    lost_at: float
    asked_at: float = 0.0
    accepted_at: float = 0.0

    def accepted(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.accepted_at = time.monotonic()

    def phases(self, next_event_at: float) -> dict[str, float]:
        """Returns the seconds of each of `PHASES`."""
        bounds = self.last_event_at, self.lost_at, self.asked_at, self.accepted_at, next_event_at
        return {
            phase: end - start for phase, (start, end) in zip(PHASES, pairwise(bounds), strict=True)
        }

    def observe(self, histogram: Histogram) -> str:
        """Records that the next event is here. Returns the seconds of each phase, for the log."""
        phases = self.phases(time.monotonic())
        for phase, seconds in phases.items():
            histogram.labels(phase).observe(seconds)
        return " ".join(f"{phase}={seconds:.3f}" for phase, seconds in phases.items())
