"""Orders the requests that wait for the nodes to have room.

1. by class     interactive before standard before batch. A request rises by one class for every
                `age_s` it has waited, so nothing waits for ever
2. by tenant    inside a class, the tenant that was served least so far (start-time fair queueing,
                with tokens as the cost): one tenant's thousand requests do not stand before
                another's first
3. by deadline  inside a tenant, the earliest

Adding, removing and finding the next one take the logarithm of the line's length (and the move of
part of a list of pointers): a router whose line is full does all three for every first token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.admission.class_line import ClassLine, Place, Waiting
from router.admission.tenant_limits import token_cost


@dataclass(slots=True, kw_only=True)
class WaitingLine:
    """Holds those who wait. A request rises by one class in `age_s` seconds."""

    age_s: float = 10.0
    _waiting: dict[Waiting, tuple[int, Place]] = field(default_factory=dict)
    """Each with its class as it has risen, and its place there."""
    _classes: dict[int, ClassLine] = field(default_factory=dict)
    _ages: dict[tuple[int, int], list[tuple[float, int, Waiting]]] = field(default_factory=dict)
    """Those below the first class by (class that they came with, class now), the oldest first."""
    _served: dict[str, float] = field(default_factory=dict)
    _virtual_time: float = 0.0
    _num_added: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: Waiting) -> bool:
        return waiting in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """Yields those who wait, the one that came first at the beginning."""
        return iter(self._waiting)

    def add(self, waiting: Waiting) -> None:
        self._num_added += 1
        place = (waiting.deadline, waiting.since, self._num_added, waiting)
        self._waiting[waiting] = (0, place)
        self._enter(waiting, place, max(0, waiting.request.priority))

    def remove(self, waiting: Waiting) -> bool:
        """Returns False if it had left before."""
        if waiting not in self._waiting:
            return False
        self._leave(waiting)
        del self._waiting[waiting]
        return True

    def pop(self, now: float) -> Waiting:
        """Returns the next one. The line must not be empty."""
        self._rise(now)
        chosen = self._classes[min(self._classes)].first(self._virtual_time)
        self._leave(chosen)
        del self._waiting[chosen]
        self._count(chosen)
        return chosen

    def too_late(self, now: float, interval_s: float) -> list[Waiting]:
        """Returns those who come after their deadline if one goes on each `interval_s`. In front of
        each it counts those that go first by their tenants' shares and their deadlines, and are in
        no lower class: all rise to the first one in the end."""
        num_before = Counter[int]()
        late = []
        for level, waiting in self._in_fair_order():
            place = 1 + sum(count for other, count in num_before.items() if other <= level)
            if now + place * interval_s > waiting.deadline:
                late.append(waiting)
            else:
                num_before[level] += 1
        return late

    def _in_fair_order(self) -> list[tuple[int, Waiting]]:
        """Returns all, with their classes, by the start that start-time fair queueing gives each
        behind the others of its tenant."""
        starts: dict[str, float] = {}
        found = []
        for waiting, (level, place) in sorted(self._waiting.items(), key=lambda item: item[1][1]):
            name = waiting.request.tenant.name
            start = starts.get(name, self._start(name))
            starts[name] = start + token_cost(waiting.request)
            found.append((start, place, level))
        return [(level, place[3]) for _, place, level in sorted(found)]

    def _rise(self, now: float) -> None:
        """Moves those up who have waited long enough."""
        for (priority, level), ages in list(self._ages.items()):
            while ages and (risen := self._level(priority, ages[0][0], now)) < level:
                waiting = ages[0][2]
                place = self._waiting[waiting][1]
                self._leave(waiting)
                self._enter(waiting, place, risen)

    def _level(self, priority: int, since: float, now: float) -> int:
        return max(0, priority - int((now - since) / self.age_s))

    def _enter(self, waiting: Waiting, place: Place, level: int) -> None:
        request = waiting.request
        self._waiting[waiting] = (level, place)
        line = self._classes.setdefault(level, ClassLine())
        name = request.tenant.name
        line.add(name, place, self._served.get(name, 0.0), self._virtual_time)
        if level:
            insort(self._ages.setdefault((request.priority, level), []), _age(place))

    def _leave(self, waiting: Waiting) -> None:
        level, place = self._waiting[waiting]
        line = self._classes[level]
        line.remove(waiting.request.tenant.name, place)
        if not line:
            del self._classes[level]
        if level:
            ages = self._ages[waiting.request.priority, level]
            del ages[bisect_left(ages, _age(place))]
            if not ages:
                del self._ages[waiting.request.priority, level]

    def _start(self, tenant: str) -> float:
        return max(self._virtual_time, self._served.get(tenant, 0.0))

    def _count(self, served: Waiting) -> None:
        """Charges the tenant. One that was away does not come back with a claim to all it
        missed."""
        name = served.request.tenant.name
        start = self._virtual_time = self._start(name)
        self._served[name] = total = start + token_cost(served.request)
        for line in self._classes.values():
            line.charged(name, total, start)
        if not self._waiting:
            self._served.clear()
            self._virtual_time = 0.0


def _age(place: Place) -> tuple[float, int, Waiting]:
    _, since, number, waiting = place
    return since, number, waiting
