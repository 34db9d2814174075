"""Says when a refused client should come back."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MIN_S = 1.0
_MAX_S = 60.0
_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Draws whole seconds from 1 to 60, a fifth up or down: clients that were refused together
    should not come back together."""

    rng: random.Random

    def seconds(self, expected_s: float) -> int:
        wanted = min(_MAX_S, max(_MIN_S, expected_s))
        jittered = wanted * self.rng.uniform(1 - _JITTER, 1 + _JITTER)
        return round(min(_MAX_S, max(_MIN_S, jittered)))
