"""Measures how much work comes in a second, quickly when it grows and calmly when it does not.

slow     the mean of the last two minutes
fast     the mean of the last 20 s, less two standard errors of it
rate     the greater of the two: a burst shows as soon as it cannot be chance, chance does not
peak     the greatest rate of the last minute, so that a gap between bursts is no calm
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

_SLOW_S = 120
_FAST_S = 20
_PEAK_S = 60
_ERRORS = 2.0


@dataclass(slots=True)
class WorkRate:
    """Counts work by the second. `since`: monotonic seconds at which counting began."""

    since: float
    _sums: deque[tuple[int, float, float]] = field(default_factory=deque)
    """Holds (second, sum, sum of squares) of the last two minutes."""
    _peaks: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, work: float) -> None:
        self._change(now, work, work * work)

    def take_back(self, now: float, work: float) -> None:
        """Counts off what was added a short time ago, and does not come after all."""
        self._change(now, -work, -work * work)

    def rate(self, now: float) -> float:
        """Returns work in a second."""
        self._forget(now)
        seen_s = max(1.0, now - self.since)
        slow = sum(total for _, total, _ in self._sums) / min(_SLOW_S, seen_s)
        fast_s = min(_FAST_S, seen_s)
        recent = [(total, squares) for at, total, squares in self._sums if at > now - fast_s]
        fast = sum(total for total, _ in recent)
        # Of work that was taken back the addition may be older than what is summed.
        error = math.sqrt(max(0.0, sum(squares for _, squares in recent)))
        return max(0.0, slow, (fast - _ERRORS * error) / fast_s)

    def peak(self, now: float) -> float:
        """Returns the greatest rate of the last minute, as far as anything asked for it."""
        rate = self.rate(now)
        peaks = self._peaks
        while peaks and peaks[-1][1] <= rate:
            peaks.pop()
        peaks.append((now, rate))
        while peaks[0][0] <= now - _PEAK_S:
            peaks.popleft()
        return peaks[0][1]

    def _change(self, now: float, work: float, square: float) -> None:
        self._forget(now)  # Nothing may ask for the rate for days.
        second = math.floor(now)
        if self._sums and self._sums[-1][0] == second:
            _, total, squares = self._sums.pop()
        else:
            total = squares = 0.0
        self._sums.append((second, total + work, squares + square))

    def _forget(self, now: float) -> None:
        while self._sums and self._sums[0][0] <= now - _SLOW_S:
            self._sums.popleft()
