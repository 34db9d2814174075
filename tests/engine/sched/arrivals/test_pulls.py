"""KV from other nodes, stepped by hand: every order of events that ends well."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.sched.arrivals.arrival import NEXT_STATES, ArrivalState
from engine.sched.scheduler import Scheduler
from kv_transfer.connectors.no_connector import NoConnectorScheduler
from tests.engine.sched.factories import (
    make_config,
    make_request,
    remote_prefill,
)
from tests.engine.sched.remote_requests import add_and_ask, finish, prompt, pulled, receive
from tests.engine.sched.step_machine import StepMachine


@pytest.mark.parametrize("token_first", [True, False])
def test_kv_and_first_token_in_either_order(machine: StepMachine, token_first: bool) -> None:
    client = add_and_ask(machine, pulled("a"))
    assert machine.scheduler.stats().num_waiting_for_remote_kvs == 1
    arrivals = [lambda: machine.supply_first_token("a"), lambda: receive(machine, "a")]
    if not token_first:
        arrivals.reverse()
    arrivals[0]()
    assert machine.step() is None
    arrivals[1]()
    step = machine.step()
    assert step is not None
    new = step.new_reqs[0]
    assert (new.prompt_len, new.num_computed_tokens) == (10, 10)
    assert len(new.prefill_token_ids) == 4 * 11
    assert (step.prefill_chunks, step.decode_add) == ([], [new.row])
    assert [(r.ok, r.attempt, r.stats.num_bytes) for r in client.kv_results] == [(True, 0, 10)]
    finish(machine)
    assert client.finish_reason == "length"
    assert client.num_cached_tokens == 0
    stats = machine.scheduler.stats()
    assert (stats.prompt_tokens_transferred, stats.prompt_tokens_computed) == (10, 0)


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_prompts_around_a_block_boundary(machine: StepMachine, length: int) -> None:
    add_and_ask(machine, pulled("a", length))
    machine.supply_first_token("a")
    finish(machine)


def test_blocks_being_filled_are_not_found(machine: StepMachine) -> None:
    first = add_and_ask(machine, pulled("a", 12))
    same = make_request("b", prompt(12, ord("a")))
    machine.add(same)
    step = machine.step()
    assert step is not None
    assert step.new_reqs[0].num_computed_tokens == 0
    machine.supply_first_token("a")
    finish(machine)
    assert first.finish_reason == "length"
    third = machine.add(make_request("c", prompt(12, ord("a"))))
    finish(machine)
    assert third.num_cached_tokens == 8


def test_what_is_cached_here_is_not_pulled(machine: StepMachine) -> None:
    machine.add(make_request("x", prompt(12, ord("a"))))
    machine.finish()
    client = add_and_ask(machine, pulled("a", 12))
    job = machine.connector.pulls["t-a"]
    # Two blocks of four; the third stays to be pulled, so that every pull has something to do.
    assert job.position == 8
    machine.supply_first_token("a")
    finish(machine)
    assert client.num_cached_tokens == 8
    assert machine.scheduler.stats().prompt_tokens_transferred == 4


def test_a_waiting_pull_does_not_stop_running_requests(machine: StepMachine) -> None:
    local = machine.add(make_request("local", prompt(6), max_tokens=10))
    machine.add(pulled("a"))
    while not local.finish_reason:
        machine.step()
    assert machine.clients["a"].tokens == []
    machine.supply_first_token("a")
    finish(machine)


def test_the_first_token_may_be_the_last(machine: StepMachine) -> None:
    """The engine learns it like any other; blocks wait until nobody writes."""
    client = add_and_ask(machine, pulled("a", max_tokens=1))
    machine.supply_first_token("a")
    assert client.finish_reason == "length"
    assert machine.scheduler.stats().num_delayed_frees == 1
    finish(machine)


def test_a_first_token_before_the_pull_has_begun(machine: StepMachine) -> None:
    machine.add(pulled("a"))
    machine.supply_first_token("a")
    finish(machine)


def test_kv_that_is_here_needs_no_other_attempt(machine: StepMachine) -> None:
    client = add_and_ask(machine, pulled("a"))
    receive(machine, "a")
    machine.take(machine.scheduler.retry_remote("a", remote_prefill("t-a", attempt=1)))
    assert [(r.ok, r.attempt) for r in client.kv_results] == [(True, 0), (True, 1)]
    machine.supply_first_token("a")
    finish(machine)


def test_kv_that_is_here_serves_when_the_first_token_never_comes(machine: StepMachine) -> None:
    add_and_ask(machine, pulled("a"))
    receive(machine, "a")
    machine.take(machine.scheduler.prefill_locally("a"))
    step = machine.step()
    assert step is not None
    assert step.new_reqs[0].num_computed_tokens == 9
    assert (step.prefill_chunks, step.decode_add) == ([], [0])
    finish(machine)


def test_pulls_wait_for_blocks_in_order() -> None:
    machine = StepMachine(make_config(), num_blocks=7)
    add_and_ask(machine, pulled("a", 14))
    machine.add(pulled("b", 14))
    machine.add(pulled("c", 2))
    machine.step()
    assert list(machine.connector.pulls) == ["t-a"]
    for name in "abc":
        machine.supply_first_token(name)
    finish(machine)


def test_no_pull_takes_the_blocks_that_running_requests_need_next() -> None:
    machine = StepMachine(make_config(), num_blocks=10)
    machine.add(make_request("local", prompt(8), max_tokens=16))
    machine.step()
    machine.step()
    machine.add(pulled("a", 20))
    for _ in range(12):
        machine.step()
        assert machine.connector.pulls == {}
    assert machine.scheduler.stats().num_preemptions == 0
    machine.supply_first_token("a")
    finish(machine)


def test_kv_without_a_row_is_given_up_before_running_requests_starve() -> None:
    """There is one row, taken by a request that needs the blocks of KV that waits for that very
    row.
    """
    config = make_config(max_num_seqs=1, enable_prefix_caching=False)
    machine = StepMachine(config, num_blocks=8, depth=2)
    add_and_ask(machine, pulled("a", 15, max_tokens=14))
    machine.add(make_request("b", prompt(4), max_tokens=17))
    machine.step()
    receive(machine, "a")
    machine.supply_first_token("a")
    assert machine.scheduler.stats().num_waiting_for_remote_kvs == 1
    while machine.scheduler.stats().num_waiting_for_remote_kvs:
        machine.step()
    finish(machine)


def test_kv_given_up_without_first_token_waits_for_it() -> None:
    config = make_config(max_num_seqs=1, enable_prefix_caching=False)
    machine = StepMachine(config, num_blocks=8, depth=1)
    local = machine.add(make_request("b", prompt(3), max_tokens=20))
    # Asked for before the running request decodes, so no headroom is kept for it.
    machine.add(pulled("a", 15))
    machine.step()
    receive(machine, "a")
    while not local.finish_reason:
        machine.step()
    assert machine.scheduler.check_empty()[0].startswith("request a")
    machine.supply_first_token("a")
    finish(machine)
    assert len(machine.clients["a"].tokens) == 8


def test_a_pulled_request_that_is_preempted_is_computed_here() -> None:
    machine = StepMachine(make_config(enable_prefix_caching=False), num_blocks=10, depth=2)
    machine.add(make_request("local", prompt(8), max_tokens=28))
    add = machine.add(pulled("a", 12, max_tokens=20))
    machine.supply_first_token("a")
    machine.step()
    receive(machine, "a")
    while machine.scheduler.stats().num_preemptions == 0:
        machine.step()
    assert add.request.num_preemptions == 1
    finish(machine)


def test_a_pull_changes_only_as_its_table_says(machine: StepMachine) -> None:
    client = add_and_ask(machine, pulled("a"))
    arrivals = machine.scheduler._remote.arrivals
    pull = arrivals.get(client.request.request_id)
    assert pull is not None
    for state in ArrivalState:
        if state not in NEXT_STATES[ArrivalState.COMING]:
            with pytest.raises(ValueError, match=f"a cannot go from COMING to {state.name}"):
                arrivals.move(pull, state)
    machine.supply_first_token("a")
    finish(machine)
    assert all(ArrivalState.ENDED in after for state, after in NEXT_STATES.items() if after)
    assert NEXT_STATES.keys() == set(ArrivalState)


def test_a_prefill_whose_token_is_the_whole_answer_is_not_pulled(machine: StepMachine) -> None:
    params = replace(remote_prefill("t-a"), first_token_only=True)
    machine.add(make_request("a", prompt(10), kv=params, max_tokens=1))
    machine.step()
    assert machine.connector.pulls == {}
    finish(machine)


def test_an_engine_without_a_connector_refuses_kv_parameters() -> None:
    scheduler = Scheduler(make_config(), 8, NoConnectorScheduler())
    outputs = scheduler.add_request(pulled("a")).outputs
    assert outputs[0].finish_reason == "error"
    assert "no KV transfer" in outputs[0].error
    assert scheduler.check_empty() == []


def test_the_connector_hears_when_a_pull_must_progress(machine: StepMachine) -> None:
    """It hears with the first token, if KV is still to come, and with the word of each later
    attempt's peer; one peer's word says nothing about the next."""
    computed = machine.connector.computed
    add_and_ask(machine, pulled("a"))
    assert computed == []
    machine.supply_first_token("a")
    assert computed == [("t-a", 0)]
    machine.take(machine.scheduler.retry_remote("a", remote_prefill("t-a", attempt=1)))
    assert computed == [("t-a", 0)], "that was the peer of the first attempt"
    machine.connector.finish("t-a")
    machine.poll_connector()
    machine.step()
    assert machine.connector.pulls["t-a"].attempt == 1
    assert computed == [("t-a", 0)]
    machine.scheduler.prompt_computed("a")
    assert computed == [("t-a", 0), ("t-a", 1)]
    receive(machine, "a")
    machine.scheduler.prompt_computed("a")
    finish(machine)
    assert len(computed) == 2


def test_a_pull_that_begins_behind_its_first_token_must_progress_at_once() -> None:
    machine = StepMachine(make_config(), num_blocks=4)
    add_and_ask(machine, pulled("a", 14))
    machine.add(pulled("b", 14))
    machine.step()
    machine.supply_first_token("b")
    assert machine.connector.computed == [], "no block is free for it"
    machine.supply_first_token("a")
    finish(machine)
    assert machine.connector.computed == [("t-a", 0), ("t-b", 0)]
