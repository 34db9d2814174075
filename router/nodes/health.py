"""Judges nodes by their answers: one that fails several requests in a row is left out for a while.

    in use ──failures in a row──▶ ejected ──time over──▶ half-open: one request at a time
       ▲                             ▲                      │  │
       │                             └────── failure ───────┘  │
       └────────────────────── success ────────────────────────┘

An ejection lasts `base_s` times the number of ejections so far, up to `max_s`. At most
`max_fraction` of a tier is ejected at once: beyond that the fault is probably not the nodes', and
sending everything to the few others would take them down too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Health:
    """Holds what is known about one node's failures. Times are monotonic seconds. `half_open` from
    an ejection to the next success."""

    consecutive_failures: int = 0
    num_ejections: int = 0
    ejected_until: float = 0.0
    half_open: bool = False
    num_probes: int = 0

    def is_ejected(self, now: float) -> bool:
        return now < self.ejected_until

    @property
    def accepts(self) -> bool:
        """Returns False while a probe is on its way and its outcome is not known."""
        return not (self.half_open and self.num_probes)

    @contextmanager
    def hold_probe(self) -> Iterator[None]:
        """Marks a request that began while the node was half-open as its probe."""
        is_probe = self.half_open
        self.num_probes += is_probe
        try:
            yield
        finally:
            self.num_probes -= is_probe


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionPolicy:
    failures: int = 3
    base_s: float = 5.0
    max_s: float = 60.0
    max_fraction: float = 0.5

    def record_success(self, health: Health) -> None:
        health.consecutive_failures = 0
        health.half_open = False

    def record_failure(self, health: Health, tier: Collection[Health], now: float) -> bool:
        """Counts a failure of `health`, a member of `tier`. Returns whether it was ejected for
        it."""
        health.consecutive_failures += 1
        if health.consecutive_failures < self.failures or health.is_ejected(now):
            return False
        num_ejected = sum(other.is_ejected(now) for other in tier)
        if num_ejected + 1 > self.max_fraction * len(tier):
            return False
        self._eject(health, now)
        return True

    def _eject(self, health: Health, now: float) -> None:
        if now - health.ejected_until > self.max_s:
            health.num_ejections = 0
        health.num_ejections += 1
        health.ejected_until = now + min(self.base_s * health.num_ejections, self.max_s)
        health.half_open = True
        health.consecutive_failures = self.failures - 1
