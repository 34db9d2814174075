"""The line's order is its definition's, found by looking at all, whatever comes, goes and rises."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.class_line import Waiting
from router.admission.tenant_limits import token_cost
from router.admission.waiting_line import WaitingLine
from router.request.tenants import Priority, Tenant
from tests.router.factories import request

AGE_S = 10.0


def waiting(
    *, tenant: str = "t", priority: int = 1, tokens: int = 1, since: float = 0.0, wait_s: float = 60
) -> Waiting:
    info = request(
        tenant=Tenant(name=tenant), priority=Priority(priority), num_prompt_tokens=tokens,
        max_tokens=1,
    )  # fmt: skip
    return Waiting(info, since, since + wait_s, lambda: None, lambda error: None)


@dataclass
class LookAtAll:
    """Is the definition: class, share of the tenant, deadline, arrival."""

    line: list[Waiting] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    virtual_time: float = 0.0

    def pop(self, now: float) -> Waiting:
        chosen = min(self.line, key=lambda waiting: self.order(waiting, now))
        self.line.remove(chosen)
        self.virtual_time = self.start(chosen)
        self.served[chosen.request.tenant.name] = self.virtual_time + token_cost(chosen.request)
        if not self.line:
            self.served.clear()
            self.virtual_time = 0.0
        return chosen

    def order(self, waiting: Waiting, now: float) -> tuple[float, ...]:
        level = max(0, waiting.request.priority - int((now - waiting.since) / AGE_S))
        return level, self.start(waiting), waiting.deadline, waiting.since

    def start(self, waiting: Waiting) -> float:
        return max(self.virtual_time, self.served.get(waiting.request.tenant.name, 0.0))


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "pop", "pop", "leave"]),
        st.sampled_from([0.0, 0.0, 0.3, 3.0, AGE_S]),
        st.sampled_from("abcde"),
        st.integers(0, 2),
        st.sampled_from([0, 1, 100, 1000]),
        st.sampled_from([1.0, 60.0, 60.0]),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=300)
@given(MOVES)
def test_the_order_is_that_of_the_definition(
    moves: list[tuple[str, float, str, int, int, float]],
) -> None:
    line, definition, now = WaitingLine(age_s=AGE_S), LookAtAll(), 0.0
    for move, pause_s, tenant, priority, tokens, wait_s in moves:
        now += pause_s
        if move == "add":
            one = waiting(tenant=tenant, priority=priority, tokens=tokens, since=now, wait_s=wait_s)
            line.add(one)
            definition.line.append(one)
        elif definition.line and move == "pop":
            one = line.pop(now)
            assert one is definition.pop(now)
            assert one not in line and not line.remove(one)
        elif definition.line:
            one = definition.line.pop(tokens % len(definition.line))
            assert line.remove(one)
        assert list(line) == definition.line


class CountedFloat(float):
    """Counts how often places are compared."""

    count = 0

    def __lt__(self, other: float) -> bool:
        type(self).count += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        type(self).count += 1
        return isinstance(other, float) and float(self) == float(other)

    __hash__ = float.__hash__


def comparisons_of_a_pop(num_waiting: int, num_tenants: int) -> float:
    """Returns the mean over 200, with another that comes for each."""
    line = WaitingLine(age_s=AGE_S)
    ones = [waiting(tenant=str(i % num_tenants)) for i in range(num_waiting + 200)]
    for i, one in enumerate(ones):
        one.deadline = CountedFloat(60.0 + i)
    for one in ones[:num_waiting]:
        line.add(one)
    CountedFloat.count = 0
    for one in ones[num_waiting:]:
        line.pop(1.0)
        line.add(one)
    return CountedFloat.count / 200


def test_a_long_line_takes_hardly_more_than_a_short_one() -> None:
    for few_tenants, many_tenants in ((1, 1), (64, 4096)):
        short = comparisons_of_a_pop(64, few_tenants)
        assert comparisons_of_a_pop(4096, many_tenants) < 4 * short + 20
