"""Orders those of one class: tenants by what they were served, and each one's requests by deadline.

A tenant that was served no more than the line's virtual time has no advance: all of those are
level, and the earliest deadline among them decides. The others come behind them, by what they were
served.

    _order   [ level: by deadline ............ | ahead: by what they were served, then deadline ]
             a tenant is charged  ──────────────▶ and comes back when the virtual time has come
             up with it
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from router.errors import Overloaded
from router.request.info import RequestInfo


@dataclass(slots=True, eq=False)
class Waiting:
    """Is one request in the line. `admit` is called when it may go, or `refuse` when it is known
    that its turn would come after its deadline."""

    request: RequestInfo
    since: float
    deadline: float
    admit: Callable[[], None]
    refuse: Callable[[Overloaded], None]


Place = tuple[float, float, int, Waiting]
"""Deadline, time of arrival, and a number that no other has: in this order one goes before another
of its tenant."""

_LEVEL = -1.0
"""It stands for all that was served to a tenant without an advance."""


@dataclass(slots=True)
class ClassLine:
    """Is one class of a line, whose virtual time never falls while requests wait."""

    _tenants: dict[str, list[Place]] = field(default_factory=dict)
    _served: dict[str, float] = field(default_factory=dict)
    """Tells what each that waits was served; `_LEVEL` without an advance."""
    _order: list[tuple[float, Place, str]] = field(default_factory=list)
    """One entry for each tenant, with its first place."""

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, tenant: str, place: Place, served: float, virtual_time: float) -> None:
        """Adds one of a tenant that was served this much so far."""
        places = self._tenants.get(tenant)
        if places is None:
            self._tenants[tenant] = [place]
            self._served[tenant] = _LEVEL if served <= virtual_time else served
        elif place > places[0]:
            insort(places, place)
            return
        else:
            self._take_out(tenant)
            places.insert(0, place)
        self._put_in(tenant)

    def remove(self, tenant: str, place: Place) -> None:
        places = self._tenants[tenant]
        index = bisect_left(places, place)
        if index:
            del places[index]
            return
        self._take_out(tenant)
        del places[0]
        if places:
            self._put_in(tenant)
        else:
            del self._tenants[tenant], self._served[tenant]

    def charged(self, tenant: str, served: float, virtual_time: float) -> None:
        """Records what the tenant was served by now, if it waits here."""
        if tenant in self._tenants:
            self._take_out(tenant)
            self._served[tenant] = _LEVEL if served <= virtual_time else served
            self._put_in(tenant)

    def first(self, virtual_time: float) -> Waiting:
        """Returns the one who is next. The line must not be empty."""
        num_level = bisect_left(self._order, (0.0,))
        while num_level < len(self._order) and self._order[num_level][0] <= virtual_time:
            tenant = self._order.pop(num_level)[2]
            self._served[tenant] = _LEVEL
            self._put_in(tenant)
            num_level += 1
        return self._order[0][1][3]

    def _entry(self, tenant: str) -> tuple[float, Place, str]:
        return self._served[tenant], self._tenants[tenant][0], tenant

    def _take_out(self, tenant: str) -> None:
        del self._order[bisect_left(self._order, self._entry(tenant))]

    def _put_in(self, tenant: str) -> None:
        insort(self._order, self._entry(tenant))
