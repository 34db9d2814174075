"""Blocks that go to host memory and come back: what is computed, what is loaded, who waits."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from engine.contracts.request import RequestStatus
from engine.contracts.steps.step_launches import LaunchTime, StepLaunches
from engine.models.recorded_steps import prompt_keys
from engine.sched.arrivals import host_source
from kv_transfer.metadata import KVTransferParams
from kv_transfer.tier import (
    HostTierEvent,
    Tier,
    TierCommand,
    TierContents,
)
from kv_transfer.tiers.host_tier import PooledHostTier
from tests.engine.sched.factories import BLOCK_SIZE, make_config, make_request, remote_decode
from tests.engine.sched.step_machine import Client, StepMachine

PROMPT = list(range(1, 22))
NUM_LOADABLE = 20


def machine_with(num_blocks: int = 12, num_slots: int = 64, **settings: int) -> StepMachine:
    return StepMachine(make_config(**settings), num_blocks, num_host_slots=num_slots)


def run(machine: StepMachine, name: str, prompt: list[int], max_tokens: int = 3) -> Client:
    client = machine.add(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True))
    machine.finish()
    return client


def forget(machine: StepMachine) -> None:
    """Fills the cache with another prompt's blocks."""
    run(machine, f"other{len(machine.clients)}", [50 + len(machine.clients)] * 40)


def begin_to_load(machine: StepMachine, name: str) -> Client:
    client = machine.add(make_request(name, PROMPT, max_tokens=3, ignore_eos=True))
    machine.schedule()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return client


def test_what_the_cache_has_forgotten_is_loaded() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    computed = machine.scheduler.stats().prompt_tokens_computed
    again = run(machine, "again", PROMPT)
    stats = machine.scheduler.stats()
    assert again.num_cached_tokens == NUM_LOADABLE == stats.prompt_tokens_loaded
    assert stats.prompt_tokens_computed - computed == len(PROMPT) - NUM_LOADABLE
    machine.check_all_done()


def begin_early(machine: StepMachine, kv: KVTransferParams | None = None) -> Client:
    """Returns a request whose first step is out, and whose KV is on its way."""
    run(machine, "first", PROMPT)
    forget(machine)
    tokens = 1 if kv is not None else 3
    client = machine.add(make_request("again", PROMPT, kv=kv, max_tokens=tokens, ignore_eos=True))
    machine.schedule()
    assert machine.host is not None
    machine.host.begin_all()
    machine.poll_connector()
    step = machine.schedule()
    assert step is not None and step.kv is not None and step.kv.load is not None
    return client


def test_a_prompt_computes_while_its_layers_are_loaded() -> None:
    machine = machine_with()
    client = begin_early(machine)
    assert not machine.may_run and client.request.status is RequestStatus.RUNNING
    machine.finish()
    assert client.tokens == client.expected and machine.num_early == 1
    assert machine.scheduler.stats().prompt_tokens_loaded == NUM_LOADABLE
    machine.check_all_done()


@pytest.mark.parametrize(
    ("recorded", "pair", "launch_s", "waited_s", "num_early"),
    [
        (True, 0.0, 0.0, 0.0, 0),
        (False, 0.0, 0.0, 0.0, 1),
        (True, 0.2, 0.0, 0.0, 1),
        (True, 0.0, 2.5, 0.0, 0),
        (True, 0.0, 1.5, 0.0, 1),
        (True, 0.0, 1.5, 0.5, 0),
    ],
    ids=["a graph", "no graph", "attends to much", "soon here", "late", "soon here by now"],
)
def test_a_rest_that_a_graph_computes_sooner_waits_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool,
    pair: float,
    launch_s: float,
    waited_s: float,
    num_early: int,
) -> None:
    """One token is left, and a step that waits for layers takes as long to launch as two tokens to
    compute. The load before took one second from its first layer on, so this one will."""
    now = 0.0
    monkeypatch.setattr(host_source, "time", SimpleNamespace(monotonic=lambda: now))
    launches = StepLaunches(
        prompts=tuple(prompt_keys(8, 16)) if recorded else (),
        one_by_one=LaunchTime(2, launch_s, pair),
    )
    machine = StepMachine(make_config(), 12, num_host_slots=64, launches=launches)
    host = machine.host
    assert host is not None
    run(machine, "first", PROMPT)
    forget(machine)
    begin_to_load(machine, "before")
    host.begin_all()
    machine.poll_connector()
    now += 1.0
    machine.finish()
    for _ in range(2):
        forget(machine)
    before, client = machine.num_early, begin_to_load(machine, "again")
    host.begin_all()
    machine.poll_connector()
    now += waited_s
    assert (machine.schedule() is not None) == bool(num_early)
    machine.finish()
    assert client.tokens == client.expected and machine.num_early - before == num_early
    assert machine.scheduler.stats().prompt_tokens_loaded == 2 * NUM_LOADABLE
    machine.check_all_done()


def test_others_are_not_made_to_wait_for_layers() -> None:
    """A prompt computes before all of its KV is there only if nobody else has anything to do."""
    machine = machine_with(num_blocks=24)
    run(machine, "first", PROMPT)
    for _ in range(3):
        forget(machine)
    machine.add(make_request("other", [7, 8], max_tokens=40, ignore_eos=True))
    machine.step()
    machine.add(make_request("again", PROMPT, max_tokens=3, ignore_eos=True))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_loaded > 0 and machine.num_early == 0
    machine.check_all_done()


@pytest.mark.parametrize("is_exported", [False, True])
def test_what_was_computed_with_a_damaged_block_is_dropped(is_exported: bool) -> None:
    """The fake worker computes nonsense then; no client, peer or other prompt may see it."""
    machine = machine_with()
    client = begin_early(machine, remote_decode("t") if is_exported else None)
    assert machine.host is not None
    (load,) = machine.host.tier._jobs._jobs.values()
    load.damaged.add(load.command.slots[2])
    if is_exported:
        assert not machine.connector.exports["t"].chunks, "nobody is told of KV that may be wrong"
    machine.finish()
    assert client.tokens == client.expected
    assert client.request.num_preemptions == 1
    assert machine.host.tier.counters["host_tier_damaged_blocks"] == 1
    assert run(machine, "once more", PROMPT).finish_reason
    machine.check_all_done()


def test_what_is_withheld_from_a_peer_is_told_once_it_is_right() -> None:
    machine = machine_with()
    client = begin_early(machine, remote_decode("t"))
    assert machine.host is not None and not machine.connector.exports["t"].chunks
    machine.host.finish()
    machine.poll_connector()
    assert machine.connector.exports["t"].chunks, "before the step's result is here"
    machine.finish()
    assert client.finish_reason == "length"
    machine.check_all_done()


def test_a_request_that_is_aborted_while_it_waits_for_layers_leaves_nothing() -> None:
    machine = machine_with()
    begin_early(machine)
    free = machine.scheduler.stats().num_free_blocks
    machine.abort("again")
    assert machine.scheduler.stats().num_free_blocks == free
    assert machine.host is not None
    (load,) = machine.host.tier._jobs._jobs.values()
    load.is_lost = True
    machine.finish()
    machine.check_all_done()


def test_what_the_cache_has_is_not_loaded() -> None:
    """Only the rest comes from host memory of a prompt whose beginning is cached."""
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    run(machine, "beginning", PROMPT[:9])
    before = machine.scheduler.stats().prompt_tokens_loaded
    assert before == 8
    run(machine, "again", PROMPT)
    assert machine.scheduler.stats().prompt_tokens_loaded - before == NUM_LOADABLE - 8
    machine.check_all_done()


def test_tenants_do_not_share_what_lies_in_host_memory() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    machine.add(make_request("other", PROMPT, cache_salt="tenant", max_tokens=3))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_loaded == 0


def test_a_prompt_with_log_probabilities_is_computed() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    machine.add(make_request("again", PROMPT, max_tokens=3, prompt_logprobs=0))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_loaded == 0
    machine.check_all_done()


def test_others_run_while_a_prompt_is_loaded() -> None:
    machine = machine_with(num_blocks=24)
    run(machine, "first", PROMPT)
    for _ in range(3):
        forget(machine)
    loading = begin_to_load(machine, "again")
    other = machine.add(make_request("other", [7, 8], max_tokens=4, ignore_eos=True))
    for _ in range(8):
        machine.step()
    machine.settle()
    assert other.finish_reason and not loading.tokens
    machine.finish()
    assert loading.tokens == loading.expected
    machine.check_all_done()


@pytest.mark.parametrize("is_exported", [False, True])
def test_blocks_of_an_aborted_request_wait_for_the_writers(is_exported: bool) -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    kv = remote_decode("t") if is_exported else None
    machine.add(make_request("again", PROMPT, kv=kv, max_tokens=1))
    machine.schedule()
    free = machine.scheduler.stats().num_free_blocks
    machine.abort("again")
    assert machine.scheduler.stats().num_free_blocks == free
    assert machine.scheduler.check_empty()
    machine.finish()
    machine.check_all_done()


def test_a_loaded_prompt_is_exported_to_its_peer() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    client = machine.add(make_request("again", PROMPT, kv=remote_decode("t"), max_tokens=1))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_loaded == NUM_LOADABLE
    assert client.finish_reason == "length"
    machine.check_all_done()


def test_a_reset_forgets_host_memory_too() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    assert machine.scheduler.reset_prefix_cache()
    run(machine, "again", PROMPT)
    assert machine.scheduler.stats().prompt_tokens_loaded == 0
    machine.check_all_done()


def test_damaged_blocks_are_computed() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    forget(machine)
    client = begin_to_load(machine, "again")
    assert machine.host is not None
    (load,) = machine.host.tier._jobs._jobs.values()
    load.damaged.add(load.command.slots[2])
    machine.finish()
    stats = machine.scheduler.stats()
    assert client.tokens == client.expected
    # The second attempt loads what lies before the damaged block.
    assert stats.prompt_tokens_loaded == 2 * BLOCK_SIZE
    assert machine.host.tier.counters["host_tier_damaged_blocks"] == 1
    machine.check_all_done()


def test_running_requests_get_the_blocks_of_one_that_only_lacks_a_row() -> None:
    machine = machine_with(num_blocks=14, max_num_seqs=1)
    run(machine, "first", PROMPT)
    forget(machine)
    runner = machine.add(make_request("runner", [9] * 4, max_tokens=60, ignore_eos=True))
    machine.step()
    machine.settle()
    begin_to_load(machine, "again")
    machine.finish()
    assert runner.tokens == runner.expected
    machine.check_all_done()


def test_equal_prompts_that_are_computed_together_take_one_slot_a_block() -> None:
    """Each further one took slots that nothing had again: host memory shrank for good."""
    machine = machine_with(num_blocks=32)
    for name in ("first", "second", "third"):
        machine.add(make_request(name, PROMPT, max_tokens=3, ignore_eos=True))
    machine.finish()
    machine.settle()
    machine.check_all_done()


def test_everything_that_random_traffic_stores_can_be_loaded() -> None:
    """The random tests would prove little if they seldom loaded anything."""
    rng, machine = random.Random(3), machine_with(num_blocks=16, num_slots=40)
    prompts = [[n] * rng.randint(8, 24) for n in range(1, 6)]
    for i in range(60):
        prompt = rng.choice(prompts)
        run(machine, f"r{i}", [*prompt, rng.randint(10, 60)], rng.randint(1, 6))
    stats = machine.scheduler.stats()
    assert stats.prompt_tokens_loaded > stats.prompt_tokens_computed
    machine.check_all_done()


def test_one_place_tells_which_tier_holds_a_block() -> None:
    machine = machine_with()
    run(machine, "first", PROMPT)
    tiers, kv_cache = machine.scheduler._remote.tiers, machine.scheduler._kv_cache
    names = kv_cache.block_names(make_request("names", PROMPT), NUM_LOADABLE)
    assert {tiers.tier_of(name) for name in names} == {Tier.GPU}
    forget(machine)
    found = [tiers.tier_of(name) for name in names]
    assert Tier.HOST in found and set(found) <= {Tier.GPU, Tier.HOST}
    assert tiers.num_held([*names[:3], b"nobody's", *names[3:]]) == 3
    assert tiers.num_held(names) == len(names) == NUM_LOADABLE // BLOCK_SIZE


# What lies on disk is weighed ------------------------------------------------------------------


def machine_with_disk() -> StepMachine:
    """Returns one that has PROMPT on disk alone, and knows how quickly it computes."""
    machine = StepMachine(make_config(), 12, num_host_slots=16, num_files=200)
    run(machine, "first", PROMPT)
    for i in range(40):
        run(machine, f"other {i}", [60 + i] * 9)
    assert machine.scheduler.stats().prefill_tokens_per_s
    assert machine.host is not None
    tiers = {machine.host.tier.tier_of(name) for name in names_of(machine)}
    assert tiers == {Tier.DISK}
    return machine


def names_of(machine: StepMachine) -> list[bytes]:
    request = machine.clients["first"].request
    return machine.scheduler.remote.host._kv_cache.block_names(request, NUM_LOADABLE)


@pytest.mark.parametrize(("seconds", "is_read"), [(1e-6, True), (1e6, False)])
def test_a_disk_is_read_only_if_that_is_quicker_than_to_compute(
    seconds: float, is_read: bool
) -> None:
    machine = machine_with_disk()
    machine.scheduler.remote.host.rate.took(NUM_LOADABLE, seconds)
    again = run(machine, "again", PROMPT)
    assert again.num_cached_tokens == NUM_LOADABLE * is_read
    stats = machine.scheduler.stats()
    assert stats.prompt_tokens_loaded == NUM_LOADABLE * is_read
    assert stats.kv_transfer["disk_tier_cheaper_to_compute"] == (not is_read)
    machine.check_all_done()


def test_a_disk_of_which_nothing_is_known_is_tried_and_timed() -> None:
    machine = machine_with_disk()
    rate = machine.scheduler.remote.host.rate
    assert rate.seconds_for(NUM_LOADABLE) == 0
    assert run(machine, "again", PROMPT).num_cached_tokens == NUM_LOADABLE
    assert rate.most_tokens == NUM_LOADABLE and rate.seconds_for(NUM_LOADABLE) > 0
    machine.check_all_done()


def test_blocks_in_host_memory_are_loaded_where_those_behind_them_are_slow_to_read() -> None:
    machine = machine_with_disk()
    host = machine.scheduler.remote.host
    host.rate.took(NUM_LOADABLE, 1e6)
    assert machine.host is not None
    names = names_of(machine)
    job = machine.host.tier.load(names[:2], [0, 1])
    machine.host.finish()
    assert machine.host.tier.take_finished()[job]
    assert [machine.host.tier.tier_of(name) for name in names[1:3]] == [Tier.HOST, Tier.DISK]
    request = make_request("again", PROMPT)
    assert host.find(request, 0) == 2 * BLOCK_SIZE


def test_a_prompt_that_waits_is_weighed_once() -> None:
    """Asked before every step, it would use up the tries that a slow disk gets."""
    machine = machine_with_disk()
    host = machine.scheduler.remote.host
    host.rate.took(NUM_LOADABLE, 1e6)
    request = make_request("again", PROMPT)
    assert [host.find(request, 0) for _ in range(100)] == [0] * 100
    assert host.rate.num_refusals == host.counters.cheaper_to_compute == 1


def test_a_disk_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks lie in host memory when they come after all."""
    machine = machine_with_disk()
    client = begin_to_load(machine, "again")
    assert machine.host is not None
    machine.schedule()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    monkeypatch.setattr(host_source, "_READ_LIMIT_S", 0.0)
    while not client.finish_reason:
        machine.step()
    assert client.tokens == client.expected and client.num_cached_tokens == 0
    stats = machine.scheduler.stats()
    assert (stats.prompt_tokens_loaded, stats.prompt_tokens_from_disk) == (0, 0)
    assert machine.scheduler.remote.host.rate.num_takes == 1
    machine.finish()
    machine.check_all_done()
    machine.host.finish()
    machine.poll_connector()
    assert not machine.host.tier.num_jobs and not machine.host.tier._slots.pins
    assert {machine.host.tier.tier_of(name) for name in names_of(machine)} == {Tier.HOST}


def test_a_disk_may_answer_as_late_as_the_engine_core_is_held_up() -> None:
    machine = machine_with_disk()
    client = begin_to_load(machine, "again")
    machine.scheduler.remote.host.loads._looked_at -= 1000.0
    machine.schedule()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    machine.finish()
    assert client.num_cached_tokens == NUM_LOADABLE
    machine.check_all_done()


# The tier itself ------------------------------------------------------------------------------


class Told:
    def __init__(self, num_slots: int, num_files: int = 0) -> None:
        self.commands: list[TierCommand] = []
        self.is_up = True
        self.tier = PooledHostTier(num_slots, 1, self._hear, num_files, num_places=2)
        self.tier.apply(TierContents(0, 0))

    def _hear(self, process: int, command: TierCommand) -> bool:
        self.commands.append(command)
        return self.is_up

    def store(self, *names: bytes) -> int:
        begun = self.tier.store([(name, 0) for name in names])
        assert begun is not None
        self.tier.apply(HostTierEvent(begun[0], 0))
        return begun[1]


def test_blocks_used_longest_ago_are_displaced_and_tails_before_heads() -> None:
    told = Told(4)
    told.store(b"a", b"b", b"c")
    told.store(b"x")
    assert told.tier.num_found([b"a", b"b", b"c"], 0) == 3
    assert told.store(b"y") == 1
    assert b"x" not in told.tier and b"a" in told.tier
    assert told.store(b"z") == 1
    assert told.tier.num_found([b"a", b"b", b"c"], 0) == 2, "the tail went"


def test_what_is_being_loaded_is_not_displaced() -> None:
    told = Told(2)
    told.store(b"a", b"b")
    job = told.tier.load([b"a", b"b"], [3, 4])
    assert told.tier.store([(b"c", 0)]) is None
    told.tier.apply(HostTierEvent(job, 0))
    assert told.store(b"c") == 1


def test_a_load_behind_a_fetch_is_marked_with_a_higher_number_than_those_before_it() -> None:
    """A step would take an older load's marks for its own, or wait for ever for its own marks,
    which a younger load with a lower number has overwritten."""
    told = Told(4, num_files=4)
    told.store(b"a")
    told.tier.apply(TierContents(0, 1, dict(enumerate([b"a"])), [b"f"]))
    told.tier.disk.add([b"f"])
    fetching = told.tier.load([b"f"], [3])
    job = told.tier.load([b"a"], [4])
    before = told.tier.ticket(job)
    told.tier.apply(HostTierEvent(job, 0))
    told.tier.apply(HostTierEvent(fetching, 0))
    after = told.tier.ticket(fetching)
    assert before is not None and after is not None
    assert after.place == before.place and after.number > before.number


def test_a_process_that_is_down_keeps_nothing() -> None:
    told = Told(4)
    told.store(b"a")
    told.is_up = False
    begun = told.tier.store([(b"b", 0)])
    assert begun is not None and told.tier.take_finished()[begun[0]] is False
    assert b"b" not in told.tier
    told.tier.process_is_gone(0)
    assert told.tier.num_found([b"a"], 0) == 0 and told.tier.num_jobs == 0
    assert told.tier.store([(b"c", 0)]) is None, "nothing begins before it is back"
    told.is_up = True
    told.tier.apply(TierContents(0, 1))
    assert b"a" not in told.tier
    assert told.store(b"c", b"d", b"e", b"f") == 4, "no slot is lost"
