"""Counts durations in buckets that grow by a fixed factor, so that quantiles are right to 5 %."""

from __future__ import annotations

from collections import Counter
from math import floor, log2

_PER_OCTAVE = 8
_LEAST = 1e-6


class LogHistogram:
    """Holds counts of the buckets that are not empty."""

    __slots__ = ("_counts", "num")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.num = 0

    def add(self, seconds: float) -> None:
        self._counts[floor(log2(seconds if seconds > _LEAST else _LEAST) * _PER_OCTAVE)] += 1
        self.num += 1

    def merge(self, other: LogHistogram) -> None:
        self._counts.update(other._counts)
        self.num += other.num

    def quantile(self, part: float) -> float:
        """Returns the middle of the bucket in which the quantile lies; 0.0 when there is none."""
        left = part * self.num
        for place, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(2 ** ((place + 0.5) / _PER_OCTAVE))
        return 0.0
