"""Calls about adapters against an engine that fails, stalls and changes: each has an answer, and at
the end names and ledger tell the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine.sched.rows.engine_adapters import READ_TIMEOUT_S
from tests.engine.lora.adapter_world import MAX_CPU_LORAS, NUM_RANKS, World

NAMES = ("start", "a", "b", "c")
PATHS = tuple(f"a{weights}/{copy}" for weights in range(4) for copy in "ab")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def load(world: World, name: str, path: str) -> None:
    task = world.start(world.names.load(name, path))
    world.finish()
    assert task.result().name == name


def check_over(world: World) -> None:
    """Checks that no call is open, and both sides know the same."""
    assert world.calls.leftovers() == [] and world.tasks == []
    ledger = world.session.ledger
    assert ledger.leftovers() == []
    digests = {ref.digest for ref in world.names.known.values()}
    assert set(ledger._known) == digests
    for rank in world.ranks.ranks:
        assert rank.memory == set(ledger.loaded()) and len(rank.memory) <= MAX_CPU_LORAS
    for client in world.machine.clients.values():
        assert client.finish_reason


def check_served(world: World) -> None:
    """Checks that every name answers, one after the other, whatever has happened."""
    world.disk.broken.clear()
    for name in sorted(world.names.known):
        client = world.ask(name)
        world.finish()
        assert client.error == "" and client.tokens == client.expected


def test_a_failed_read_is_the_fault_of_those_who_waited(world: World) -> None:
    """Host memory has room for two; the folder of the first is away when it is wanted again."""
    for name, path in (("a", "a1/a"), ("b", "a2/a"), ("c", "a3/a")):
        load(world, name, path)
    world.disk.broken.add("a1/a")
    for _ in range(2):
        client = world.ask("a")
        world.finish()
        assert "cannot be read" in client.error
    check_served(world)
    task = world.start(world.names.unload("a"))
    world.finish()
    assert task.done() and task.exception() is None
    check_over(world)


def test_an_unload_ends_when_its_weights_get_another_name(world: World) -> None:
    load(world, "c", "a2/a")
    running = world.ask("c")
    world.turn()
    unload = world.start(world.names.unload("c"))
    world.turn()
    assert not unload.done() and not running.finish_reason
    again = world.start(world.names.load("d", "a2/b"))
    world.turn()
    assert unload.done() and unload.exception() is None
    assert again.result().digest == "a2"
    world.finish()
    assert running.error == ""
    check_served(world)
    check_over(world)


def test_what_does_not_fit_is_refused_while_memory_is_full_of_adapters_in_use(
    world: World,
) -> None:
    for name, path in (("a", "a1/a"), ("b", "a2/a")):
        load(world, name, path)
    running = [world.ask("a"), world.ask("b")]
    world.turn()
    task = world.start(world.names.load("c", "a3/a"))
    world.disk.broken.add("a3/a")
    for rank in range(NUM_RANKS):
        world.turn()
        world.ranks.read(rank)
    assert not any(one.finish_reason for one in running)
    world.finish()
    assert "cannot be read" in str(task.exception())
    world.disk.broken.clear()
    load(world, "c", "a3/a")
    check_served(world)
    check_over(world)


def test_a_disk_that_does_not_answer_holds_nobody(world: World) -> None:
    for name, path in (("a", "a1/a"), ("b", "a2/a"), ("c", "a3/a")):
        load(world, name, path)
    waiting = world.ask("a")
    load_again = world.start(world.names.load("d", "a1/b"))
    world.turn()
    world.ranks.read(0)
    world.turn()
    assert not waiting.finish_reason and not load_again.done()
    world.clock.now += READ_TIMEOUT_S + 1
    world.turn()
    for said in (waiting.error, str(load_again.exception())):
        assert "has not answered for" in said
    late = world.ask("a")
    assert "has not answered for" in late.error
    unload = world.start(world.names.unload("b"))
    world.turn()
    assert unload.done()
    world.finish()
    check_served(world)
    check_over(world)


def test_a_rank_that_could_read_drops_what_another_could_not(world: World) -> None:
    task = world.start(world.names.load("a", "a1/a"))
    world.turn()
    world.ranks.read(0)
    world.disk.broken.add("a1/a")
    world.finish()
    assert task.exception() is not None and "a1" not in world.ranks.ranks[0].memory
    check_over(world)


def test_a_slot_without_host_memory_admits_nobody(world: World) -> None:
    """A request has a slot and waits for blocks; its adapter leaves host memory before a worker has
    filled the slot."""
    load(world, "a", "a1/a")
    running = world.ask("start")
    world.turn()
    waiting = world.ask("a")
    world.turn()
    for name, path in (("b", "a2/a"), ("c", "a3/a")):
        world.start(world.names.load(name, path))
        for rank in range(NUM_RANKS):
            world.turn_of_calls()
            world.ranks.read(rank)
        world.turn_of_calls()
    assert not running.finish_reason and "a1" not in world.ranks.ranks[0].memory
    world.finish()
    assert waiting.error == "" and waiting.tokens == waiting.expected
    check_over(world)


class AdapterStory(RuleBasedStateMachine):
    """Loads, failures, renames, kills, unloads, requests, role switches, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(name=st.sampled_from(NAMES), path=st.sampled_from(PATHS), in_place=st.booleans())
    def load(self, name: str, path: str, *, in_place: bool) -> None:
        self.world.start(self.world.names.load(name, path, in_place=in_place))

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.world.start(self.world.names.unload(name))

    @precondition(lambda self: self.world.tasks)
    @rule(data=st.data())
    def caller_goes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.tasks)).cancel()
        self.world.settle()

    @rule(path=st.sampled_from(PATHS))
    def breaks_or_mends(self, path: str) -> None:
        self.world.disk.broken ^= {path}

    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def rank_reads(self, rank: int) -> None:
        self.world.ranks.read(rank)

    @precondition(lambda self: self.world.names.known)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.names.known)))
        error = self.world.ask(name).error
        assert error == "" or "has not answered for" in error

    @rule(times=st.integers(1, 4))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.world.turn()

    @rule(seconds=st.sampled_from([1.0, 100.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now += seconds
        self.world.settle()

    @rule()
    def role_switches(self) -> None:
        self.world.turn()
        self.world.switch_role()

    @rule()
    def engine_dies(self) -> None:
        """And a new node takes its place."""
        self.world.die()
        assert self.world.tasks == [] and self.world.calls.leftovers() == []
        self.world.close()
        self.world = World()

    def teardown(self) -> None:
        world = self.world
        world.finish()
        check_over(world)
        check_served(world)
        for name in sorted(world.names.known):
            world.start(world.names.unload(name))
        world.finish()
        check_over(world)
        assert not world.names.known
        world.close()


TestAdapterStory = AdapterStory.TestCase
TestAdapterStory.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
