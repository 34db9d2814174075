"""Orders the requests that wait for the nodes to have room.

1. by class     interactive before standard before batch. A request rises by one class for every
                `age_s` it has waited, so nothing waits for ever
2. by tenant    inside a class, the tenant that was served least so far (start-time fair queueing,
                with tokens as the cost): one tenant's thousand requests do not stand before
                another's first
3. by deadline  inside a tenant, the earliest

The line is short (it is bounded), so the next one is found by looking at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.admission.tenant_limits import token_cost
from router.request.info import RequestInfo


@dataclass(slots=True, eq=False)
class Waiting:
    """Is one request in the line; `admit` is called when it may go."""

    request: RequestInfo
    since: float
    deadline: float
    admit: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class WaitingLine:
    """Holds those who wait. A request rises by one class in `age_s` seconds."""

    age_s: float = 10.0
    _waiting: dict[Waiting, None] = field(default_factory=dict)
    _served: dict[str, float] = field(default_factory=dict)
    _virtual_time: float = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: Waiting) -> bool:
        return waiting in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """Yields those who wait, the one that came first at the beginning."""
        return iter(self._waiting)

    def add(self, waiting: Waiting) -> None:
        self._waiting[waiting] = None

    def remove(self, waiting: Waiting) -> bool:
        """Returns False if it had left before."""
        if waiting not in self._waiting:
            return False
        del self._waiting[waiting]
        return True

    def pop(self, now: float) -> Waiting:
        """Returns the next one. The line must not be empty."""
        chosen = min(self._waiting, key=lambda waiting: self._order(waiting, now))
        del self._waiting[chosen]
        self._count(chosen)
        return chosen

    def _order(self, waiting: Waiting, now: float) -> tuple[int, float, float, float]:
        risen = int((now - waiting.since) / self.age_s)
        level = max(0, waiting.request.priority - risen)
        return level, self._start(waiting), waiting.deadline, waiting.since

    def _start(self, waiting: Waiting) -> float:
        return max(self._virtual_time, self._served.get(waiting.request.tenant.name, 0.0))

    def _count(self, served: Waiting) -> None:
        """Charges the tenant. One that was away does not come back with a claim to all it
        missed."""
        start = self._virtual_time = self._start(served)
        self._served[served.request.tenant.name] = start + token_cost(served.request)
        if not self._waiting:
            self._served.clear()
            self._virtual_time = 0.0
