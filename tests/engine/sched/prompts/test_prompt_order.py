"""The order of prompts, stepped by hand, and its bound under random arrivals."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.steps.step_shapes import counts_to_measure
from engine.contracts.steps.step_work import AttentionCost, ModelCost
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.prompts.prompt_order import Line, PromptOrder, StepRoom, full_tokens

BUDGET, FULL = 8192, 1024
TOKEN_S = 1e-4


def chunks_of(pair: float = 0.0) -> EvenChunks:
    """A token costs 1, and each token that it sees `pair`."""
    seen = AttentionCost(window=None, flops_of_prompts=pair, flops_of_decodes=0.0, kv_bytes=0.0)
    cost = ModelCost(
        flops_per_token=1.0,
        flops_per_sample=0.0,
        weight_bytes=0.0,
        token_bytes=0.0,
        attention=(seen,),
    )
    return EvenChunks(cost, BUDGET)


def order_of(pair: float = 0.0, patience: float = 8.0) -> PromptOrder:
    return PromptOrder(chunks=chunks_of(pair), full_tokens=FULL, patience=patience)


def parts(room: StepRoom, *lengths: int) -> list[int]:
    found = []
    for length in lengths:
        count = room.part(0, length)
        if not count:
            break
        room.take(0, count)
        found.append(count)
    return found


def met(order: PromptOrder) -> StepRoom:
    return order.room(now=0.0, tokens=BUDGET, longest_part=BUDGET, num_prompts=2)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([100, 200, 300], [100, 200, 300]),  # Short ones share.
        ([100, 900, 100], [100, 900]),  # Until the step is full.
        ([100, 1000], [100]),  # Who shares a step ends in it.
        ([2000, 2000], [2000]),  # Who fills it is alone, and whole up to two full steps.
        ([2049, 10], [FULL]),  # Who takes several has one full step of each,
    ],
)
def test_steps_are_filled(lengths: list[int], expected: list[int]) -> None:
    assert parts(met(order_of()), *lengths) == expected


@pytest.mark.parametrize(
    ("shortest", "part"), [(10.0, FULL // 4), (128.0, FULL // 4), (300.0, 600), (5000.0, FULL)]
)
def test_parts_of_a_very_long_prompt_take_as_long_as_two_of_the_shortest(
    shortest: float, part: int
) -> None:
    order = order_of()
    assert parts(order.room(0.0, BUDGET, BUDGET, 2, shortest), 20_000) == [part]
    assert parts(order.room(9.0, BUDGET, BUDGET, 2, 7000.0), 20_000) == [part], "it may come again"
    assert parts(order.room(11.0, BUDGET, BUDGET, 2, 7000.0), 20_000) == [FULL]
    assert parts(order.room(12.0, BUDGET, BUDGET, 2, shortest), 20_000) == [part], "it came"


def test_a_prompt_that_meets_nobody_has_the_whole_budget() -> None:
    order = order_of()
    assert parts(order.room(0.0, BUDGET, BUDGET, num_prompts=1), 120_000) == [BUDGET]
    assert parts(order.room(1.0, BUDGET, BUDGET, num_prompts=2), 12_000) == [FULL]
    assert parts(order.room(60.0, BUDGET, BUDGET, num_prompts=1), 12_000) == [FULL]
    assert parts(order.room(61.5, BUDGET, BUDGET, num_prompts=1), 120_000) == [BUDGET]


def test_budget_and_threshold_hold() -> None:
    order = order_of()
    assert parts(order.room(0.0, 700, BUDGET, num_prompts=2), 2000) == [700]
    assert parts(order.room(0.0, BUDGET, 256, num_prompts=2), 2000) == [256]
    assert parts(StepRoom(700, 256), 2000, 300, 300, 300) == [256, 256, 188]


def test_parts_behind_long_contexts_take_as_long_as_others() -> None:
    order = order_of(pair=1e-4)
    room = met(order)
    first, later = room.part(0, 4000), room.part(100_000, 1500)
    assert first == FULL
    assert FULL / 16 < later <= FULL / 8
    assert order.chunks.worth(100_000, later) <= FULL
    room.take(100_000, later)
    assert room.part(0, 200) == 0, "a step may be full of time before it is full of tokens"


def test_what_is_due_has_every_second_step() -> None:
    order = order_of()
    assert order.due_at(arrived_at=2.0, seconds=0.5) == 6.0
    assert [order.turn(now, 6.0) for now in (5.0, 6.0, 6.1, 6.2)] == [
        Line.SHORTEST,
        Line.DUE,
        Line.SHORTEST,
        Line.DUE,
    ]


def test_the_full_step_is_found() -> None:
    assert counts_to_measure(10_000) == [2048, 4096, 8192, 10_000], "fewer are full nowhere"
    assert counts_to_measure(64) == [64]
    # A step takes 20 ms and 10 µs for each token: 6529 of 8192 tokens take 5 % longer each.
    flat = [(n, 0.020 + 1e-5 * n) for n in counts_to_measure(8192)]
    best = flat[-1][1] / 8192
    found = full_tokens(flat)
    assert (0.020 + 1e-5 * found) / found == pytest.approx(1.05 * best, rel=1e-3)
    assert full_tokens([(128, 0.001), (256, 0.002)]) == 128, "nothing is gained by more"
    assert full_tokens([(512, 0.004)]) == 512
    with pytest.raises(ValueError, match="no step"):
        full_tokens([])


# A bound ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prompt:
    came_at: float
    length: int
    left: int
    ended_at: float = -1.0

    @property
    def due_at(self) -> float:
        return self.came_at + 8.0 * TOKEN_S * self.length


def play(prompts: list[Prompt]) -> None:
    """Computes them: a token takes `TOKEN_S`, and nothing else takes time."""
    order, now, waiting = order_of(), 0.0, list(prompts)
    while waiting:
        there = [prompt for prompt in waiting if prompt.came_at <= now]
        if not there:
            now = min(prompt.came_at for prompt in waiting)
            continue
        line = order.turn(now, min(prompt.due_at for prompt in there))
        there.sort(key=lambda prompt: prompt.due_at if line is Line.DUE else prompt.left)
        room = order.room(now, BUDGET, BUDGET, len(there))
        took = 0
        for prompt in there:
            count = room.part(0, prompt.left)
            if not count:
                break
            room.take(0, count)
            prompt.left -= count
            took += count
            if not prompt.left:
                prompt.ended_at = now + TOKEN_S * took
        now += TOKEN_S * took
        waiting = [prompt for prompt in waiting if prompt.left]


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from([1, 50, 700, 1500, 3000, 20_000])),
        min_size=1,
        max_size=60,
    )
)
def test_everything_ends_within_its_bound(arrivals: list[tuple[float, int]]) -> None:
    """A prompt that is due waits for others that were due before it, all of which came
    before; each step for these may be followed by one of up to two full steps for another."""
    prompts = [Prompt(at, length, length) for at, length in arrivals]
    play(prompts)
    for prompt in prompts:
        before = [other for other in prompts if other.due_at <= prompt.due_at]
        steps = sum(1 + other.length // FULL for other in before)
        work = sum(other.length for other in before)
        assert prompt.ended_at <= prompt.due_at + TOKEN_S * (work + (steps + 2) * BUDGET)
        assert prompt.ended_at >= prompt.came_at + TOKEN_S * min(prompt.length, FULL) - 1e-9


def test_a_long_prompt_holds_each_short_one_up_by_a_part() -> None:
    long = Prompt(0.0, 120_000, 120_000)
    short = [Prompt(2.0 + 0.4 * i, 700, 700) for i in range(100)]
    play([long, *short])
    first, *others = [one.ended_at - one.came_at for one in short]
    assert first <= TOKEN_S * (700 + BUDGET), "none had met the long one"
    assert max(others) <= TOKEN_S * (700 + 2 * FULL), "its last part may have two full steps"
    assert long.ended_at <= TOKEN_S * (120_000 + 100 * 700) + 1e-9
