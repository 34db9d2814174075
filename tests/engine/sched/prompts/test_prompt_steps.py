"""The scheduler with an order of prompts, stepped by hand: who goes on, who waits, for how long."""

from __future__ import annotations

import random

import pytest

from engine.config import SchedulingPolicy
from kv_transfer.config import KVTransferConfig
from tests.engine.sched.factories import make_config, make_order, make_request, remote_decode
from tests.engine.sched.step_machine import StepMachine

FULL = 8
EXPORTING = KVTransferConfig(kv_role="kv_producer")
TOKEN_S = 0.001


class Node:
    """A prefill node whose tokens take a millisecond each, and nothing else takes time."""

    def __init__(
        self, num_blocks: int = 200, policy: SchedulingPolicy = "fcfs", max_num_seqs: int = 8
    ) -> None:
        config = make_config(
            max_num_batched_tokens=64,
            max_model_len=512,
            policy=policy,
            max_num_seqs=max_num_seqs,
            kv_transfer=EXPORTING,
        )
        self.now = 1.0
        self.machine = StepMachine(config, num_blocks, order=make_order(FULL))
        prompts = self.machine.scheduler._prompts
        prompts._clock = lambda: self.now
        for _ in range(4):
            prompts._prefill_rate.add_step(1000, 1000 * TOKEN_S)
        prompts._prefill_rate.add_step = lambda tokens, seconds: None  # type: ignore[method-assign]
        self.num_added = 0
        self.ended_at: dict[str, float] = {}

    def add(self, name: str, length: int, priority: int = 0, first: int = 0) -> None:
        """Adds a prompt; those with the same `first` token begin alike."""
        self.num_added += 1
        prompt = [(first or self.num_added) % 60 + 1] + [i % 60 + 1 for i in range(length - 1)]
        kv = remote_decode(f"t-{name}")
        self.machine.add(make_request(name, prompt, priority=priority, max_tokens=1, kv=kv))

    def step(self) -> dict[str, int]:
        """Plays a step, and returns how many tokens of each prompt it computed."""
        step = self.machine.step()
        if step is None:
            return {}
        rows = self.machine.scheduler._running.table.rows
        parts = {row.request_id: n for i, n in step.prefill_chunks if (row := rows[i]) is not None}
        self.machine.settle()
        for transfer_id in self.machine.connector.transfer_ids():
            self.machine.connector.advance(transfer_id)
        self.machine.poll_connector()
        self.now += TOKEN_S * sum(parts.values())
        for name in parts:
            if self.machine.clients[name].finish_reason:
                self.ended_at[name] = self.now
        return parts

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    def finish(self) -> None:
        self.machine.finish()
        self.machine.check_all_done()


def test_prompts_that_fill_a_step_run_one_after_the_other() -> None:
    node = Node()
    for name in "abc":
        node.add(name, 12)
    assert node.steps(3) == [{"a": 12}, {"b": 12}, {"c": 12}]
    node.finish()


def test_short_prompts_share_a_step_and_go_ahead_of_long_ones() -> None:
    node = Node()
    node.add("long", 40)
    node.add("a", 4)
    node.add("b", 3)
    node.add("c", 4)
    assert node.steps(3) == [{"b": 3, "a": 4}, {"c": 4}, {"long": 8}]
    node.finish()


def test_a_long_prompt_stops_for_a_short_one_and_goes_on_behind_its_last_part() -> None:
    node = Node()
    node.add("long", 40)
    node.add("other", 40)
    assert node.steps(2) == [{"long": 8}, {"long": 8}]
    node.add("short", 5)
    assert node.steps(4) == [{"short": 5}, {"long": 8}, {"long": 16}, {"other": 8}]
    node.finish()


def test_what_is_due_has_every_second_step_and_no_more() -> None:
    node = Node()
    node.add("long", 40)
    node.add("x", 2)
    assert node.step() == {"x": 2}
    node.now += 8 * 40 * TOKEN_S
    for name in "abcd":
        node.add(name, 8)
    assert node.steps(6) == [{"long": 8}, {"a": 8}, {"long": 8}, {"b": 8}, {"long": 8}, {"c": 8}]
    node.finish()


def test_a_cached_prefix_makes_a_prompt_short() -> None:
    node = Node()
    node.add("first", 60, first=7)
    node.add("x", 1)
    while "first" not in node.ended_at:
        node.step()
    node.add("new", 24)
    node.add("again", 62, first=7)
    parts = node.step()
    assert list(parts) == ["again"] and parts["again"] <= 6, "its first blocks are cached"
    node.finish()


def test_priority_comes_first() -> None:
    node = Node(policy="priority")
    node.add("batch", 4, priority=1)
    node.add("batch too", 3, priority=1)
    node.add("urgent", 30, priority=0)
    node.now += 100
    assert node.steps(3) == [{"urgent": 8}, {"urgent": 8}, {"urgent": 14}]
    assert node.step() == {"batch": 4, "batch too": 3}
    node.finish()


def test_who_is_due_and_finds_no_room_gets_the_next_that_is_free() -> None:
    """Short prompts would take the blocks that a long one waits for, again and again."""
    node = Node(num_blocks=20)
    node.add("a", 70)
    node.add("x", 1)
    assert node.steps(2) == [{"x": 1}, {"a": 8}]
    node.add("large", 60)
    node.now = 1.5
    for index in range(12):
        node.add(f"s{index}", 7)
    seen = [next(iter(node.step())) for _ in range(12)]
    assert seen[:8] == ["a"] * 7 + ["large"], "none enters before the large one"
    assert seen[8:] == ["s0", "large", "s1", "large"], "and then short ones go on"
    node.finish()


@pytest.mark.parametrize("seed", range(6))
def test_everything_ends_within_the_stated_bound(seed: int) -> None:
    """A due prompt waits for those that were due before it, each of whose steps may be followed by
    one of another, of up to two full steps."""
    rng = random.Random(seed)
    node = Node(num_blocks=400, max_num_seqs=64)
    came: dict[str, tuple[float, int]] = {}
    arrivals = sorted((1.0 + rng.random(), rng.choice([1, 5, 9, 30, 120])) for _ in range(60))
    while arrivals or node.machine.scheduler.has_unfinished_requests():
        while arrivals and arrivals[0][0] <= node.now:
            _, length = arrivals.pop(0)
            name = f"r{len(came)}"
            came[name] = node.now, length
            node.add(name, length)
        if not node.step() and arrivals:
            node.now = arrivals[0][0]
    due = {name: at + 8 * TOKEN_S * length for name, (at, length) in came.items()}
    for name, due_at in due.items():
        before = [came[other][1] for other in due if due[other] <= due_at]
        others = sum(1 + length // FULL for length in before) + 2
        assert node.ended_at[name] <= due_at + TOKEN_S * (sum(before) + others * 2 * FULL)
    node.finish()


def test_without_being_measured_half_of_the_steps_are_in_order_of_arrival() -> None:
    node = Node()
    node.machine.scheduler._prompts._prefill_rate._num_steps = 0
    for name, length in (("a", 12), ("b", 9), ("c", 11), ("d", 10)):
        node.add(name, length)
    assert [next(iter(node.step())) for _ in range(4)] == ["a", "b", "c", "d"]
    node.finish()
