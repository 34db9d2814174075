"""Decides which requests go on to the nodes, which wait, and which are refused for now.

    1. limits     the tenant's rates                                        429
    2. shedding   batch requests, more of them the longer the line is       503
    3. slot       there is room: go on; the slot is free again at the first byte
       line       there is none: wait (`waiting_line`); the line is full    503
    4. deadline   it would come too late, by its place in the line (when it comes, and again as
                  the line goes on), by the time it has waited, or by the estimate of its
                  placement                                                 503

Waiting happens here and not at the nodes, because here requests can still be compared. An answer
that would come too late is refused at once: the nodes' time goes to those it is of use to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from router.admission.class_line import Waiting
from router.admission.line_pace import LinePace
from router.admission.retry_after import RetryAfter
from router.admission.tenant_limits import TenantLimits
from router.admission.waiting_line import WaitingLine
from router.errors import Overloaded, RateLimited
from router.placement.policy import Placement
from router.request.info import RequestInfo
from router.request.tenants import Priority

_SLACK = 1.2


class Refusal(StrEnum):
    """Says why a request was refused."""

    RATE_LIMITED = "rate_limited"
    SHED = "shed"
    LINE_FULL = "line_full"
    TOO_LATE = "too_late"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Bounds what is let through.

    Attributes:
        slots_per_node: Requests that wait for their first byte, for each node that computes
            prompts.
        max_waiting: Length of the line.
        wait_s: Longest wait of requests that name no deadline, in seconds; 0: any.
        num_routers: Replicas that share the nodes.
    """

    slots_per_node: int = 64
    max_waiting: int = 1024
    wait_s: float = 60.0
    num_routers: int = 1


@dataclass(slots=True, kw_only=True)
class AdmissionGate:
    """Lets requests for one model through to its nodes. `num_nodes` counts those that compute
    prompts; `clock` gives monotonic seconds; `tenants` may be shared with other gates."""

    limits: GateLimits
    num_nodes: Callable[[], int]
    clock: Callable[[], float]
    rng: random.Random
    on_request: Callable[[RequestInfo], None] = lambda request: None
    """Records every request within its tenant's rates, also of one that is refused then."""
    line: WaitingLine = field(default_factory=WaitingLine)
    num_started: int = 0
    """Requests that have a slot."""
    refusals: Counter[Refusal] = field(default_factory=Counter)
    tenants: TenantLimits | None = None
    _tenants: TenantLimits = field(init=False)
    _retry_after: RetryAfter = field(init=False)
    _pace: LinePace = field(default_factory=LinePace)

    def __post_init__(self) -> None:
        self._retry_after = RetryAfter(self.rng)
        self._tenants = self.tenants or TenantLimits(
            retry_after=self._retry_after, num_routers=self.limits.num_routers
        )

    @property
    def is_used(self) -> bool:
        """Returns whether requests have slots, or wait for some."""
        return self.num_started > 0 or len(self.line) > 0

    def offer(
        self,
        request: RequestInfo,
        admit: Callable[[], None],
        refuse: Callable[[Overloaded], None],
        waited_s: float = 0.0,
    ) -> Waiting | None:
        """Calls `admit`, now (and returns None) or when there is room; or `refuse`, as soon as it
        is known that there will be none in time. A caller that is refused that way, or learns later
        that nothing will answer, says so (`give_back`). The request came `waited_s` seconds ago.

        Raises:
            RateLimited: the tenant has used up its rates.
            Overloaded: the line is full, or too long for the request's deadline or class.
        """
        self.check_rates(request)
        if not request.is_idle_class:
            self.on_request(request)
        try:
            return self._let_in(request, admit, refuse, waited_s)
        except Overloaded:
            self.give_back(request)
            raise

    def _let_in(
        self,
        request: RequestInfo,
        admit: Callable[[], None],
        refuse: Callable[[Overloaded], None],
        waited_s: float,
    ) -> Waiting | None:
        now = self.clock()
        self._check_shedding(request)
        self._check_idle(request)
        if self.num_started < self.num_slots() and not len(self.line):
            self._start(admit)
            return None
        self._check_line(request, waited_s)
        if not len(self.line):
            self._pace.line_begins(now)
        since = now - waited_s
        waiting = Waiting(request, since, since + self.deadline_s(request), admit, refuse)
        self.line.add(waiting)
        return waiting

    def check_rates(self, request: RequestInfo) -> None:
        """Takes what the request costs from its tenant's rates. Raises `RateLimited`."""
        try:
            self._tenants.take(request, self.clock())
        except RateLimited:
            self.refusals[Refusal.RATE_LIMITED] += 1
            raise

    def give_back(self, request: RequestInfo, num_requests: int = 0) -> None:
        """Gives its tenant the tokens of a request that nothing answers, and this many requests."""
        self._tenants.give_back(request, num_requests)

    def free(self) -> None:
        """Takes back the slot of a request that has its first byte, or has ended without one."""
        self.num_started -= 1
        now = self.clock()
        has_measured = self._pace.slot_freed(now, is_waited_for=len(self.line) > 0)
        while len(self.line) and self.num_started < self.num_slots():
            self._start(self.line.pop(now).admit)
        if has_measured:
            self._refuse_late(now)

    def withdraw(self, waiting: Waiting) -> None:
        """Takes a request whose client has left out of the line."""
        self.line.remove(waiting)

    def too_late(self, waiting: Waiting) -> Overloaded:
        """Returns the answer to `waiting`, whose deadline has come."""
        self.line.remove(waiting)
        return self._refuse(
            Refusal.TOO_LATE,
            f"No node had room within {self.deadline_s(waiting.request):g} s.",
            self.drain_s(),
        )

    def check_placement(self, request: RequestInfo, placement: Placement, waited_s: float) -> None:
        """Raises `Overloaded` when the first token would come after the deadline that the request
        names. One that names none may take as long to compute as it takes, and has waited too long
        only if its computing would not begin in time."""
        ahead_s = placement.ttft_s if request.ttft_deadline_s else placement.queue_s
        late_s = waited_s + ahead_s - self.deadline_s(request)
        if late_s > 0:
            raise self._refuse(
                Refusal.TOO_LATE,
                f"The request would have to wait about {ahead_s:.0f} s more, and may not.",
                late_s,
            )

    def num_slots(self) -> int:
        """Returns this router's share of what the nodes may have to do at once."""
        limits = self.limits
        share = 1.0 if limits.num_routers == 1 else _SLACK / limits.num_routers
        return max(1, round(limits.slots_per_node * max(1, self.num_nodes()) * share))

    def deadline_s(self, request: RequestInfo) -> float:
        return request.ttft_deadline_s or self.limits.wait_s or float("inf")

    def drain_s(self) -> float:
        """Returns the time until the line as it is now will have gone on."""
        return self._pace.drains_in_s(len(self.line) + 1, self.clock(), self.num_slots())

    def retry_after_s(self) -> int:
        """Returns when one that cannot even be let into the line should come back."""
        return self._retry_after.seconds(self.drain_s())

    def _check_shedding(self, request: RequestInfo) -> None:
        fill = len(self.line) / self.limits.max_waiting
        if request.priority is Priority.BATCH and self.rng.random() < shed_probability(fill):
            raise self._refuse(
                Refusal.SHED, "There is no room for batch requests now.", self.drain_s()
            )

    def _check_idle(self, request: RequestInfo) -> None:
        """Refuses a request of the idle class where another one would have to wait."""
        is_busy = len(self.line) > 0 or self.num_started >= self.num_slots()
        if request.is_idle_class and is_busy:
            raise self._refuse(Refusal.SHED, "There is no idle capacity now.", self.drain_s())

    def _check_line(self, request: RequestInfo, waited_s: float) -> None:
        if len(self.line) >= self.limits.max_waiting:
            raise self._refuse(
                Refusal.LINE_FULL,
                f"{len(self.line)} requests are waiting.",
                self._pace.next_place_in_s(self.clock(), self.num_slots()),
            )
        ahead_s = self._pace.surely_drains_in_s(len(self.line) + 1)
        late_s = waited_s + ahead_s - self.deadline_s(request)
        if late_s > 0 and request.priority is not Priority.INTERACTIVE:
            raise self._too_many(len(self.line), late_s)

    def _refuse_late(self, now: float) -> None:
        """Refuses those in the line of whom it is sure by now that they wait in vain: they may ask
        elsewhere meanwhile, and have not begun a stream that can only end with an error."""
        interval_s = self._pace.sure_interval_s
        num_waiting = len(self.line)
        for waiting in self.line.too_late(now, interval_s):
            if waiting.request.priority is not Priority.INTERACTIVE and self.line.remove(waiting):
                late_s = now + num_waiting * interval_s - waiting.deadline
                waiting.refuse(self._too_many(num_waiting, late_s))

    def _too_many(self, num_waiting: int, late_s: float) -> Overloaded:
        return self._refuse(
            Refusal.TOO_LATE,
            f"{num_waiting} requests are waiting, which takes longer than this one may.",
            late_s,
        )

    def _refuse(self, reason: Refusal, why: str, come_back_s: float) -> Overloaded:
        self.refusals[reason] += 1
        return Overloaded(
            f"{why} Try again later.", retry_after_s=self._retry_after.seconds(come_back_s)
        )

    def _start(self, admit: Callable[[], None]) -> None:
        self.num_started += 1
        admit()


def shed_probability(fill: float) -> float:
    """Returns how likely a batch request is refused when the line is filled to `fill`: surely from
    a third on."""
    return min(1.0, 300 * fill**5)
