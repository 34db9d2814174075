"""Which data-parallel group gets a request: stepped by hand, and against a reference policy that
knows the groups by what went in and out alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.contracts.group_step import GroupStep
from engine.contracts.request import Request
from engine.kv_cache.block_hash import pack_tokens
from engine.sched.groups.group_choice import TOKENS_PER_REQUEST, choose_group
from engine.sched.scheduler_view import GroupOffer
from tests.engine.sched.factories import BLOCK_SIZE, VOCAB_SIZE, make_config, make_request
from tests.engine.sched.group_machine import GroupMachine


def prompt_of(length: int, first: int = 1) -> list[int]:
    rng = random.Random(first)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def machine_of(num_blocks: int = 64, num_groups: int = 2, **limits: Any) -> GroupMachine:
    return GroupMachine(make_config(**limits), num_blocks, num_groups)


def test_an_empty_node_fills_its_groups_in_turn() -> None:
    machine = machine_of(num_groups=3)
    groups = [machine.add(make_request(f"r{i}", prompt_of(8, first=10 * i))) for i in range(6)]
    assert groups == [0, 1, 2, 0, 1, 2]
    machine.finish()


def test_an_idle_node_uses_the_caches_of_all_groups() -> None:
    machine = machine_of(num_groups=3)
    groups = []
    for turn in range(2):
        for i in range(3):
            prompt = [*prompt_of(24, first=10 * i), turn]
            groups.append(machine.add(make_request(f"{turn}.{i}", prompt)))
            machine.finish()
    assert groups == [0, 1, 2, 0, 1, 2]


def test_a_prompt_follows_its_prefix() -> None:
    machine = machine_of()
    shared = prompt_of(96)
    first = machine.add(make_request("first", shared))
    machine.finish()
    machine.add(make_request("other", prompt_of(9, first=3), max_tokens=40))
    machine.step()
    for turn in range(3):
        request = make_request(f"turn {turn}", [*shared[:80], turn], max_tokens=2)
        assert machine.add(request) == first, "though it has more to do"
        for _ in range(4):
            machine.step()
        assert request.num_cached_tokens == 80
    machine.finish()


def test_a_longer_queue_outweighs_a_prefix() -> None:
    """The others compute the prefix once, and have it from then on."""
    machine = machine_of(max_num_batched_tokens=16, max_model_len=256)
    shared = prompt_of(8)
    first = machine.add(make_request("first", shared, max_tokens=1))
    machine.finish()
    assert machine.add(make_request("long", [*shared, *prompt_of(60, 5)])) == first
    assert machine.add(make_request("follows", [*shared, 9])) != first
    machine.finish()
    found = [
        group.offer(make_request("next", [*shared, 9])).num_cached_tokens
        for group in machine.scheduler.groups
    ]
    assert found == [8, 8]


@pytest.mark.parametrize("known", ["r", "r.1"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_request_that_is_refused_leaves_nothing_behind(known: str, group: int) -> None:
    """A choice of it has the name of a request that goes on, in the same group or in another."""
    machine = machine_of()
    old = make_request(known, prompt_of(8), max_tokens=3)
    new = make_request("r", prompt_of(8), num_choices=2)
    old.group, new.group = 0, group
    machine.add(old)
    with pytest.raises(ValueError, match=rf"{known}.* exists already"):
        machine.scheduler.add_request(new)
    machine.finish()
    assert old.is_finished and not machine.scheduler.check_empty()


def test_a_group_without_room_comes_last() -> None:
    machine = machine_of(num_blocks=32, max_model_len=120)
    shared = prompt_of(64)
    first = machine.add(make_request("first", shared, max_tokens=56))
    for _ in range(3):
        machine.step()
    assert machine.scheduler.groups[first].offer(make_request("?", shared)).has_room
    filler = make_request("filler", [*shared, *prompt_of(40, first=2)], max_tokens=8)
    filler.group = first
    assert machine.add(filler) == first
    machine.step()
    follower = make_request("follower", [*shared, *prompt_of(30, first=4)])
    offer = machine.scheduler.groups[first].offer(follower)
    assert offer.num_cached_tokens == 64
    assert not offer.has_room
    assert machine.add(follower) != first
    machine.finish()


def test_choices_stay_together() -> None:
    """They share the KV of their prompt, which one group has; they are aborted there one by one."""
    machine = machine_of()
    machine.add(make_request("before", prompt_of(30), max_tokens=20))
    request = make_request("n", prompt_of(13, first=5), num_choices=3)
    group = machine.add(request)
    machine.step()
    machine.step()
    other = machine.scheduler.groups[1 - group].facts()
    assert {fact.num_prompt_tokens for fact in other.requests} == {30}
    machine.abort("n.1")
    machine.finish()
    ends = [machine.answers[name].finish_reason for name in request.choice_ids]
    assert ends == ["length", "abort", "length"]


def test_a_prompt_that_is_cached_leaves_the_step_of_all_groups_one_of_decodes() -> None:
    """Groups have graphs of decodes alone."""
    machine = machine_of()
    prompt = prompt_of(9)
    group = machine.add(make_request("first", prompt, max_tokens=1))
    machine.finish()
    beside = make_request("beside", prompt_of(5, first=7), max_tokens=20)
    again = make_request("again", prompt, max_tokens=2)
    beside.group, again.group = 1 - group, group
    machine.add(beside)
    machine.step()
    machine.step()
    machine.add(again)
    step = machine.step()
    assert step is not None and (step.num_decodes, step.num_tokens) == (1, 1)
    machine.finish()


def test_of_equals_the_one_with_most_free_blocks_is_best() -> None:
    offers = [GroupOffer(0, 0, 1, 5, True), GroupOffer(0, TOKENS_PER_REQUEST, 0, 9, True)]
    assert choose_group(offers) == 1
    assert choose_group(offers[::-1]) == 0
    assert choose_group([offers[0], offers[0]]) == 0
    crowded = GroupOffer(10_000, 0, 0, 0, False)
    assert choose_group([crowded, offers[0]]) == 1
    assert choose_group([crowded]) == 0


# A reference policy ------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    """Is a request of a group: `num_scheduled` and `num_computed` tokens of its prompt."""

    request: Request
    num_scheduled: int = 0
    num_computed: int = 0


@dataclass(slots=True)
class ReferenceGroup:
    """Counts what a group has to do and has done, from messages. Its cache forgets nothing."""

    requests: dict[str, Known] = field(default_factory=dict)
    prefixes: set[tuple[int, ...]] = field(default_factory=set)
    of_prompt: dict[bytes, Known] = field(default_factory=dict)
    rows: dict[int, Known] = field(default_factory=dict)

    def num_cached(self, tokens: list[int]) -> int:
        count = 0
        for stop in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):
            if tuple(tokens[:stop]) not in self.prefixes:
                break
            count = stop
        return count

    def cost(self, tokens: list[int]) -> int:
        waiting = sum(len(one.request.spec.prompt_token_ids) for one in self.requests.values())
        waiting -= sum(one.num_scheduled for one in self.requests.values())
        return waiting + TOKENS_PER_REQUEST * len(self.requests) - self.num_cached(tokens)

    def computed(self, tokens: list[int]) -> None:
        for stop in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            self.prefixes.add(tuple(tokens[:stop]))


class Reference:
    """Follows a `GroupMachine` whose steps are settled at once."""

    def __init__(self, machine: GroupMachine) -> None:
        self.machine = machine
        self.groups = [ReferenceGroup() for _ in machine.workers]
        self.given = [0] * len(self.groups)

    def choose(self, request: Request) -> int:
        tokens = request.spec.prompt_token_ids
        costs = [group.cost(tokens) for group in self.groups]
        free = [group.stats().num_free_blocks for group in self.machine.scheduler.groups]
        return min(
            range(len(costs)), key=lambda index: (costs[index], -free[index], self.given[index])
        )

    def add(self, group: int, request: Request) -> None:
        self.given[group] += 1
        known = self.groups[group].requests[request.request_id] = Known(request)
        self.groups[group].of_prompt[pack_tokens(request.spec.prompt_token_ids)] = known

    def step(self) -> None:
        step = self.machine.step()
        if step is not None:
            self._scheduled(step)
        self.forget_ended()

    def _scheduled(self, step: GroupStep) -> None:
        for group, own in zip(self.groups, step.steps, strict=True):
            if own is None:
                continue
            for new in own.new_reqs:
                known = group.rows[new.row] = group.of_prompt[new.prefill_token_ids]
                known.num_scheduled = known.num_computed = new.num_computed_tokens
            for row, count in own.prefill_chunks:
                known = group.rows[row]
                known.num_scheduled += count
                known.num_computed += count
            for known in map(group.rows.__getitem__, own.decode_add):
                is_last = known.num_scheduled == len(known.request.spec.prompt_token_ids) - 1
                known.num_scheduled += is_last
                known.num_computed += is_last
            for known in group.rows.values():
                answer = self.machine.answers[known.request.request_id]
                tokens = [*known.request.spec.prompt_token_ids, *answer.tokens]
                is_whole = known.num_computed == len(known.request.spec.prompt_token_ids)
                group.computed(tokens[: len(tokens) - 1 if is_whole else known.num_computed])

    def forget_ended(self) -> None:
        for group in self.groups:
            for name in list(group.requests):
                if self.machine.answers[name].finish_reason:
                    del group.requests[name]


@pytest.mark.parametrize("seed", range(8))
def test_choices_are_those_of_the_reference_policy(seed: int) -> None:
    rng = random.Random(seed)
    machine = machine_of(
        512, rng.choice([2, 3, 4]), max_num_seqs=64, max_num_batched_tokens=24, max_model_len=512
    )
    reference = Reference(machine)
    openings = [prompt_of(rng.randrange(40, 200), first) for first in range(3)]
    used = set()
    for number in range(40):
        opening = rng.choice(openings)
        tail = prompt_of(rng.randrange(1, 20), number)
        tokens = [*opening[: rng.randrange(len(opening))], 1 + number, *tail]
        request = make_request(f"r{number}", tokens, max_tokens=rng.randrange(1, 30))
        expected = reference.choose(request)
        assert machine.add(request) == expected, f"request {number}"
        used.add(expected)
        reference.add(expected, request)
        if rng.random() < 0.1:
            machine.abort(f"r{rng.randrange(number + 1)}")
            reference.forget_ended()
        for _ in range(rng.randrange(4)):
            reference.step()
    assert len(used) == len(machine.workers)
    machine.finish()
    for answer in machine.answers.values():
        if answer.finish_reason != "abort":
            assert answer.tokens == answer.expected


def test_requests_that_only_another_node_can_compute_are_named_by_all_groups() -> None:
    machine = machine_of()
    for number, group in enumerate(machine.scheduler.groups):
        group.admission._stranded.append(f"r{number}")
    assert machine.scheduler.admission.take_stranded() == ["r0", "r1"]
    assert machine.scheduler.admission.take_stranded() == []
