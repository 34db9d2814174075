"""Keeps a rate that may be exceeded for a moment and not in the long run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Fills with `rate` a second up to `burst`. Begins full.

    A request that finds anything in it may take what it needs, even more than there is: the debt is
    paid by those who come next. So a single large request is served, and the long-run rate holds.
    """

    rate: float
    burst: float
    _level: float = field(init=False)
    _filled_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._level = self.burst

    def wait_s(self, now: float) -> float:
        """Returns the time until something may be taken; 0 for now."""
        self._fill(now)
        return 0.0 if self._level > 0 else -self._level / self.rate + _MOMENT_S

    def take(self, amount: float) -> None:
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.burst, self._level + self.rate * max(0.0, now - self._filled_at))
        self._filled_at = now


_MOMENT_S = 1e-3
"""A bucket must have something in it, not only be out of debt."""
