"""Plans of where experts go: complete, equal in slots, near the best there can be, and stable."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.expert_placement import (
    LEAST_GAIN,
    Placement,
    copies_of,
    expected_loads,
    initial_placement,
    loads_of_experts,
    moves_between,
    plan_placement,
    rounds_of,
)
from engine.layers.feed_forward.expert_share import TURNS, turns_of_copies


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, list[int]]:
    """Draws a placement, mostly one that was planned before, and the loads that were observed."""
    num_ranks = draw(st.integers(2, 8))
    num_slots = draw(st.integers(1, 12))
    least = max(num_slots, num_ranks)
    total = num_ranks * num_slots
    num_experts = draw(st.integers(min(least, total), total))
    load = st.one_of(st.integers(0, 10), st.integers(0, 1 << 40))
    placement = initial_placement(num_experts, total - num_experts, num_ranks)
    for _ in range(draw(st.integers(0, 2))):
        before = draw(st.lists(load, min_size=num_experts, max_size=num_experts))
        placement = plan_placement(before, placement)
    return placement, draw(st.lists(load, min_size=num_experts, max_size=num_experts))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_plans(case: tuple[Placement, list[int]]) -> None:
    """All experts are somewhere, slots stay equally many, nothing gets worse, and a new placement
    is at most the heaviest copy above the mean; a second plan for the same loads changes nothing.
    """
    current, loads = case
    planned = plan_placement(loads, current)
    assert [len(held) for held in planned] == [len(held) for held in current]
    assert {expert for held in planned for expert in held} == set(range(len(loads)))
    of_ranks = expected_loads(planned, loads)
    assert max(of_ranks) <= max(expected_loads(current, loads)) * (1 + 1e-9)
    numbers = [len(copies) for copies in copies_of(planned, len(loads))]
    heaviest = max(load / number for load, number in zip(loads, numbers, strict=True))
    if planned is not current:
        assert max(of_ranks) <= (sum(loads) / len(planned) + heaviest) * (1 + 1e-9)
        assert max(of_ranks) < max(expected_loads(current, loads)) * (1 - LEAST_GAIN)
    assert plan_placement(loads, planned) is planned


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(1, 5))
def test_moves_make_the_plan(case: tuple[Placement, list[int]], most_sent: int) -> None:
    """Slots filled from what was there before are those of the plan; no rank sends more in a round
    than it may, and what stays is not sent."""
    current, loads = case
    planned = plan_placement(loads, current)
    moves = moves_between(current, planned)
    found = [list(held) for held in current]
    for of_round in rounds_of(moves, most_sent):
        for rank in range(len(current)):
            assert sum(one.from_rank == rank for one in of_round) <= most_sent
        for one in of_round:
            assert current[one.rank][one.slot] != planned[one.rank][one.slot]
            found[one.rank][one.slot] = current[one.from_rank][one.from_slot]
    assert tuple(map(tuple, found)) == planned
    for rank, (before, after) in enumerate(zip(current, planned, strict=True)):
        kept = sum(a == b for a, b in zip(before, after, strict=True))
        assert kept == len(before) - sum(one.rank == rank for one in moves)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_token_finds_each_expert_once(case: tuple[Placement, list[int]]) -> None:
    """On one rank alone, and all copies have turns: as many as the others, or one less."""
    current, loads = case
    planned = plan_placement(loads, current)
    tables = [turns_of_copies(planned, len(loads), rank) for rank in range(len(planned))]
    for expert, copies in enumerate(copies_of(planned, len(loads))):
        turns = [int((tables[rank][:, expert] == slot).sum()) for rank, slot in copies]
        assert sum(turns) == TURNS and max(turns) - min(turns) <= 1
        assert sum(int((table[:, expert] >= 0).sum()) for table in tables) == TURNS


def test_a_busy_expert_gets_copies() -> None:
    """Expert 0 has as many tokens as the other seven together; one spare slot a rank."""
    current = initial_placement(8, 4, 4)
    loads = [70, 10, 10, 10, 10, 10, 10, 10]
    assert max(expected_loads(current, loads)) == 55
    planned = plan_placement(loads, current)
    assert all(0 in held for held in planned)
    assert max(expected_loads(planned, loads)) == 37.5


def test_tokens_of_copies_are_those_of_their_expert() -> None:
    assert loads_of_experts(((0, 1), (2, 0)), [[5, 1], [2, 7]]) == [12, 1, 2]


def test_experts_are_packed_without_copies() -> None:
    """Two busy experts on one rank part."""
    planned = plan_placement([9, 8, 1, 0], initial_placement(4, 0, 2))
    assert sorted(expected_loads(planned, [9, 8, 1, 0])) == [9, 9]
    assert planned[0][0] == 0


def test_equal_loads_change_nothing() -> None:
    current = initial_placement(16, 0, 4)
    assert plan_placement([3] * 16, current) is current
    assert plan_placement([0] * 16, current) is current
