"""Measures how fast one node is, compared with what is expected of all.

The median of the last few ratios: one prompt that was held up says nothing, several do.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_NUM_KEPT = 15
_MIN_OBSERVED = 3


@dataclass(slots=True)
class Pace:
    """Compares times: `factor` is 1 for an ordinary node and 2 for one that takes twice as long.
    `is_known`: enough was observed for it to mean anything."""

    factor: float = 1.0
    is_known: bool = False
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))

    def observe(self, took_s: float, expected_s: float) -> None:
        if expected_s <= 0 or took_s <= 0:
            return
        self._ratios.append(took_s / expected_s)
        self.is_known = len(self._ratios) >= _MIN_OBSERVED
        if self.is_known:
            self.factor = statistics.median(self._ratios)
