"""Measures what the router did lately: totals are sampled each second, the last minute is kept."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Totals = Mapping[str, float]

_WINDOW_S = 60


@dataclass(slots=True)
class TrafficMeter:
    """Samples `totals`, which gives counters that only grow, by name."""

    totals: Callable[[], Totals]
    _samples: deque[tuple[float, Totals]] = field(
        default_factory=lambda: deque(maxlen=_WINDOW_S + 1)
    )

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(1.0)

    def sample(self, now: float) -> None:
        self._samples.append((now, dict(self.totals())))

    def per_second(self) -> dict[str, float]:
        """Returns rates over the last minute, or since the start."""
        if len(self._samples) < 2:
            return dict.fromkeys(self.totals(), 0.0)
        (then, old), (now, new) = self._samples[0], self._samples[-1]
        return {name: (value - old.get(name, 0.0)) / (now - then) for name, value in new.items()}
