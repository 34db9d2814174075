"""Order of waiting requests, against sorting."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SchedulingPolicy
from engine.contracts.request import Request
from engine.contracts.request_spec import IDLE_PRIORITY
from engine.sched.prompts.prompt_order import Line
from engine.sched.prompts.prompt_queue import PromptQueue
from engine.sched.request_queue import RequestQueue
from tests.engine.sched.factories import make_request


def request_of(order: int, priority: int = 0, length: int = 3) -> Request:
    request = make_request(f"r{order}", [1] * length, priority=priority)
    request.arrival_order = order
    return request


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(
    moves=st.lists(st.tuples(st.sampled_from(["add", "pop", "remove", "back"]), st.integers(0, 2)))
)
def test_pops_in_order_whatever_happened_before(
    policy: SchedulingPolicy, moves: list[tuple[str, int]]
) -> None:
    queue = RequestQueue(policy)
    model: list[Request] = []
    popped: list[Request] = []
    for order, (move, number) in enumerate(moves):
        if move == "add":
            model.append(request_of(order, priority=number, length=number + 1))
            queue.add(model[-1])
        elif move == "pop" and model:
            model.sort(key=lambda request: request.sort_key(policy))
            assert queue.peek() is model[0]
            popped.append(queue.pop())
            assert popped[-1] is model.pop(0)
        elif move == "remove" and model:
            queue.remove(model.pop(number % len(model)))
        elif move == "back" and popped:
            model.append(popped.pop())
            queue.add(model[-1])
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(request.num_tokens for request in model)
        assert {r.request_id for r in queue} == {r.request_id for r in model}
    while model:
        model.sort(key=lambda request: request.sort_key(policy))
        assert queue.pop() is model.pop(0)
    assert not queue


def test_requests_that_left_are_not_kept() -> None:
    """Entries behind the first one are dropped lazily, but not for ever: prompts are long."""
    queue = RequestQueue("priority")
    queue.add(request_of(0))
    left = [request_of(order, priority=9) for order in range(1, 1000)]
    for request in left:
        queue.add(request)
        queue.remove(request)
    del request
    assert sum(sys.getrefcount(one) > 3 for one in left) < 200
    assert queue.pop().arrival_order == 0


def test_prompts_that_left_by_one_line_are_not_kept_in_the_other() -> None:
    def judge(request: Request) -> None:
        request.prompt_work = request.num_tokens * 1.0

    queue = PromptQueue("fcfs", judge)
    queue.add(request_of(0, length=1))
    queue.turn_to(Line.DUE)
    left = [request_of(order, length=9) for order in range(1, 1000)]
    for request in left:
        request.due_at = -1.0
        queue.add(request)
        assert queue.pop() is request
    del request
    assert sum(sys.getrefcount(one) > 3 for one in left) < 200
    queue.turn_to(Line.SHORTEST)
    assert queue.pop().arrival_order == 0


def test_the_idle_class_comes_last_whatever_the_policy() -> None:
    for policy in ("fcfs", "priority"):
        queue = RequestQueue(policy)
        for order, priority in enumerate([IDLE_PRIORITY, 7, IDLE_PRIORITY, 5]):
            queue.add(request_of(order, priority))
        names = [queue.pop().request_id for _ in range(4)]
        assert names == (["r1", "r3", "r0", "r2"] if policy == "fcfs" else ["r3", "r1", "r0", "r2"])


def test_empty_twice_and_unknown() -> None:
    queue = RequestQueue("fcfs")
    with pytest.raises(IndexError):
        queue.pop()
    request = request_of(1)
    queue.remove(request)
    queue.add(request)
    with pytest.raises(ValueError, match="queued already"):
        queue.add(request)
    assert request in queue
