"""Allows retries in proportion to traffic: a failing cluster is not hit harder for failing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RetryBudget:
    """Keeps a purse of retries: each request pays in `ratio`, each retry takes out 1.

    It begins full and holds `burst` at most. The burst saves the requests that wait on a node at
    the moment it dies; the ratio bounds what a cluster gets that fails on and on: in the long run
    `1 + ratio` attempts per request.
    """

    ratio: float = 0.2
    burst: int = 200
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.burst

    def add_request(self) -> None:
        self.left = min(self.burst, self.left + self.ratio)

    def try_take(self) -> bool:
        """Returns whether one more retry may start."""
        if self.left < 1:
            return False
        self.left -= 1
        return True
