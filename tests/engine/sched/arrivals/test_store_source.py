"""Blocks that another node computed come from the store; what it lacks or withholds is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.contracts.request import RequestStatus
from engine.sched.arrivals import store_source
from kv_transfer.tier import AskMeta, FetchMeta, LoadMeta
from kv_transfer.tiers import load_pieces
from tests.engine.sched.factories import compressed_layers, make_config, make_request
from tests.engine.sched.memory_host_tier import Store, new_store
from tests.engine.sched.step_machine import Client, StepMachine

PROMPT = list(range(1, 22))
NUM_LOADABLE = 20


def machine_with(store: Store, num_slots: int = 64) -> StepMachine:
    return StepMachine(make_config(), 12, num_host_slots=num_slots, store=store)


def run(machine: StepMachine, name: str, prompt: list[int] = PROMPT) -> Client:
    client = machine.add(make_request(name, prompt, max_tokens=3, ignore_eos=True))
    machine.finish()
    return client


@pytest.fixture
def store() -> Store:
    """Has what another node computed."""
    found = new_store()
    run(machine_with(found), "first")
    assert all(found)
    return found


def test_what_another_node_computed_is_loaded(store: Store) -> None:
    machine = machine_with(store)
    client = run(machine, "again")
    assert client.tokens == client.expected
    stats = machine.scheduler.stats()
    assert client.num_cached_tokens == NUM_LOADABLE == stats.prompt_tokens_from_store
    assert stats.prompt_tokens_loaded == NUM_LOADABLE
    assert stats.prompt_tokens_computed == len(PROMPT) - NUM_LOADABLE
    assert machine.host is not None
    given = machine.host.tier.counters["store_tier_put_blocks"]
    machine.check_all_done()
    again = run(machine, "more")
    assert again.tokens == again.expected
    assert machine.host.tier.counters["store_tier_put_blocks"] == given, "it has them"


def test_another_tenant_finds_nothing(store: Store) -> None:
    machine = machine_with(store)
    request = make_request("other", PROMPT, max_tokens=3, ignore_eos=True, cache_salt="x")
    client = machine.add(request)
    machine.finish()
    assert client.tokens == client.expected
    assert machine.scheduler.stats().prompt_tokens_from_store == 0


def test_a_block_that_one_process_lacks_ends_the_prefix(store: Store) -> None:
    names = list(store[0])
    for name in names[2:4]:
        del store[1][name]
    machine = machine_with(store)
    client = run(machine, "again")
    assert client.tokens == client.expected
    assert 0 < machine.scheduler.stats().prompt_tokens_from_store < NUM_LOADABLE
    machine.check_all_done()


def test_what_was_read_moves_on_while_more_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_pieces, "_MOST_BLOCKS", 2)
    machine = machine_with(store)
    client = ask(machine, "again")
    assert machine.host is not None
    jobs = machine.host._jobs
    until(machine, lambda: not any(isinstance(job, AskMeta) for _, job in jobs))
    asked = [job for process, job in jobs if process == 0 and isinstance(job, FetchMeta)]
    assert [len(job.names) for job in asked] == [2, 2, 1]
    until(machine, lambda: any(isinstance(job, LoadMeta) for _, job in jobs))
    assert any(isinstance(job, FetchMeta) for _, job in jobs), "read meanwhile"
    (load,) = machine.scheduler.remote.store.loads
    assert not machine.host.tier.give_up(load.job), "its blocks are written to"
    assert not client.tokens
    machine.finish()
    assert client.tokens == client.expected and client.num_cached_tokens == NUM_LOADABLE
    machine.check_all_done()


@pytest.mark.parametrize("lost", range(5))
def test_a_piece_that_lacks_a_block_fails_the_whole(
    store: Store, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_pieces, "_MOST_BLOCKS", 2)
    machine = machine_with(store)
    client = ask(machine, "again")
    assert machine.host is not None
    jobs = machine.host._jobs
    until(machine, lambda: not any(isinstance(job, AskMeta) for _, job in jobs))
    del store[1][list(store[1])[lost]]
    machine.finish()
    assert client.tokens == client.expected
    assert client.num_cached_tokens == lost * 4, "what came before it is in host memory"
    assert machine.host.tier.counters["store_tier_missed_blocks"] == 1
    machine.check_all_done()


def test_pieces_are_given_up_as_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_pieces, "_MOST_BLOCKS", 2)
    machine = machine_with(store)
    client = ask(machine, "again")
    assert machine.host is not None
    jobs = machine.host._jobs
    until(machine, lambda: not any(isinstance(job, AskMeta) for _, job in jobs))
    monkeypatch.setattr(store_source, "_READ_LIMIT_S", -1.0)
    machine.schedule()
    machine.finish()
    assert client.tokens == client.expected and client.num_cached_tokens == 0
    assert machine.host.tier.counters["host_tier_loaded_blocks"] == 0
    machine.check_all_done()


def until(machine: StepMachine, is_so: Callable[[], bool]) -> None:
    """Lets transfer processes do their jobs one by one."""
    assert machine.host is not None
    while not is_so():
        machine.host.advance()
        machine.poll_connector()


def ask(machine: StepMachine, name: str) -> Client:
    client = machine.add(make_request(name, PROMPT, max_tokens=3, ignore_eos=True))
    machine.schedule()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return client


def test_a_block_that_goes_after_the_answer_is_computed(store: Store) -> None:
    machine = machine_with(store)
    client = ask(machine, "again")
    assert machine.host is not None
    while any(isinstance(job, AskMeta) for _, job in machine.host._jobs):
        machine.host.advance()
    machine.poll_connector()
    assert any(isinstance(job, FetchMeta) for _, job in machine.host._jobs)
    store[0].clear()
    machine.finish()
    assert client.tokens == client.expected
    assert machine.host.tier.counters["store_tier_missed_blocks"] > 0
    machine.check_all_done()


def test_a_store_that_lacks_what_it_said_it_has_counts_as_slow(store: Store) -> None:
    machine = machine_with(store)
    own = machine.scheduler._steps.prefill_rate
    while not own.tokens_per_s:
        own.add_step(1000, 1.0)
    ask(machine, "again")
    assert machine.host is not None
    while any(isinstance(job, AskMeta) for _, job in machine.host._jobs):
        machine.host.advance()
    machine.poll_connector()
    store[0].clear()
    machine.finish()
    rate = machine.scheduler.remote.store.rate
    assert rate.seconds_for(NUM_LOADABLE) > 1.5 * own.seconds_for(NUM_LOADABLE)


def test_a_store_that_does_not_answer_costs_a_few_prompts_a_moment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_source, "_ASK_LIMIT_S", -1.0)
    machine = machine_with(store)
    assert machine.host is not None
    clients = []
    for number in range(store_source._MOST_UNANSWERED + 3):
        prompt = [number + 30, *PROMPT]
        request = make_request(f"r{number}", prompt, max_tokens=1, ignore_eos=True)
        clients.append(machine.add(request))
        kept = machine.host._jobs[:]
        machine.host._jobs.clear()
        for _ in range(20):
            machine.step()
        machine.host._jobs[:] = kept + machine.host._jobs
    asked = {job.job for _, job in machine.host._jobs if isinstance(job, AskMeta)}
    assert len(asked) == store_source._MOST_UNANSWERED
    monkeypatch.setattr(store_source, "_ASK_LIMIT_S", 100.0)
    machine.finish()
    assert [client.tokens for client in clients] == [client.expected for client in clients]
    again = run(machine, "again")
    assert again.tokens == again.expected and again.num_cached_tokens == NUM_LOADABLE
    machine.check_all_done()


@pytest.mark.parametrize("num_blocks", [300, 100])
def test_windows_that_roll_take_blocks_for_what_comes_alone(num_blocks: int) -> None:
    """Blocks of all that was asked for are more than a request is admitted with."""
    prompt, store = [1 + i % 60 for i in range(300)], new_store()
    config = make_config(
        kv_layers=compressed_layers(), max_model_len=400, max_num_batched_tokens=16
    )
    for size in (300, num_blocks):
        machine = StepMachine(config, size, num_host_slots=600, store=store)
        run(machine, "asks", prompt)
        machine.check_all_done()
    assert machine.scheduler.stats().prompt_tokens_from_store == 288
