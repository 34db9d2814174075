"""KV from other nodes that does not come: tried again, computed here, called off."""

from __future__ import annotations

import pytest

import engine.sched.arrivals.prefill_source as prefill_source
from tests.engine.sched.factories import (
    make_config,
    make_request,
    remote_prefill,
)
from tests.engine.sched.remote_requests import add_and_ask, finish, prompt, pulled, receive
from tests.engine.sched.step_machine import StepMachine


@pytest.mark.parametrize("has_part", [True, False])
def test_a_failed_pull_is_reported_and_tried_again(machine: StepMachine, has_part: bool) -> None:
    """The KV that came stays, if it is known to be complete."""
    client = add_and_ask(machine, pulled("a", 30))
    machine.connector.advance("t-a")
    came = machine.connector.pulls["t-a"].position
    assert 0 < came < 30
    machine.connector.fail("t-a", tells_part=has_part)
    machine.poll_connector()
    assert [(r.ok, r.attempt, r.retryable) for r in client.kv_results] == [(False, 0, True)]
    assert "test wanted it" in client.kv_results[0].reason
    assert (machine.scheduler.stats().num_free_blocks < 32) == has_part
    assert machine.step() is None
    machine.take(machine.scheduler.retry_remote("a", remote_prefill("t-a", attempt=1)))
    machine.step()
    again = machine.connector.pulls["t-a"]
    assert (again.attempt, again.position) == (1, came if has_part else 0)
    machine.supply_first_token("a")
    finish(machine)
    assert [(r.ok, r.attempt) for r in client.kv_results] == [(False, 0), (True, 1)]
    assert machine.scheduler.stats().prompt_tokens_transferred == 30


@pytest.mark.parametrize("token_known", [True, False])
@pytest.mark.parametrize("has_part", [True, False])
def test_a_failed_pull_is_computed_here(
    machine: StepMachine, token_known: bool, has_part: bool
) -> None:
    """The engine goes on behind the tokens whose KV is complete."""
    client = add_and_ask(machine, pulled("a", 30))
    if token_known:
        machine.supply_first_token("a")
    machine.connector.advance("t-a")
    came = machine.connector.pulls["t-a"].position if has_part else 0
    machine.connector.fail("t-a", tells_part=has_part)
    machine.poll_connector()
    machine.take(machine.scheduler.prefill_locally("a"))
    step = machine.step()
    assert step is not None
    assert step.prefill_chunks == [(0, 30 + token_known - came)]
    finish(machine)
    assert client.finish_reason == "length"
    assert len(client.tokens) == 8
    assert machine.scheduler.stats().prompt_tokens_transferred == came


def test_a_part_is_given_up_before_running_requests_starve() -> None:
    machine = StepMachine(make_config(max_num_seqs=1, max_num_batched_tokens=64), num_blocks=9)
    add_and_ask(machine, pulled("a", 14))
    machine.connector.advance("t-a")
    machine.connector.fail("t-a")
    machine.poll_connector()
    assert machine.scheduler.stats().num_free_blocks < 9
    machine.add(make_request("b", prompt(8), max_tokens=24))
    while machine.scheduler.stats().num_free_blocks:
        machine.step()
    machine.settle()
    for _ in range(8):
        machine.step()
    assert machine.scheduler.stats().num_preemptions == 0
    assert machine.scheduler._kv_cache.request_ids() == ["b"]
    machine.take(machine.scheduler.prefill_locally("a"))
    finish(machine)


def test_log_probabilities_of_a_prompt_need_all_of_it(machine: StepMachine) -> None:
    add_and_ask(machine, pulled("a", 30, prompt_logprobs=0))
    machine.connector.advance("t-a")
    machine.connector.fail("t-a")
    machine.poll_connector()
    machine.take(machine.scheduler.prefill_locally("a"))
    step = machine.step()
    assert step is not None and step.prefill_chunks == [(0, 30)]
    finish(machine)


def test_computed_here_when_the_pull_has_stopped(machine: StepMachine) -> None:
    """The engine computes in its blocks, behind what is complete of them."""
    add_and_ask(machine, pulled("a", 30))
    machine.connector.advance("t-a")
    machine.take(machine.scheduler.prefill_locally("a"))
    pull = machine.connector.pulls["t-a"]
    assert pull.stopping
    assert machine.step() is None
    kept = pull.whole_blocks(machine.memory)
    receive(machine, "a")
    step = machine.step()
    assert step is not None
    assert (step.new_reqs[0].block_ids,) == pull.block_ids
    assert step.prefill_chunks == [(0, 30 - kept)]
    finish(machine)


def test_computed_here_although_the_pull_does_not_stop(
    machine: StepMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are its own until then; the request gets others."""
    add_and_ask(machine, pulled("a"))
    machine.take(machine.scheduler.prefill_locally("a"))
    assert machine.connector.pulls["t-a"].stopping
    assert machine.step() is None
    monkeypatch.setattr(prefill_source, "_STOP_S", 0.0)
    machine.take(machine.scheduler.prefill_locally("a"))
    step = machine.step()
    assert step is not None
    assert step.prefill_chunks == [(0, 10)]
    stats = machine.scheduler.stats()
    assert (stats.num_delayed_frees, stats.num_waiting_for_remote_kvs) == (1, 0)
    finish(machine)


def test_another_attempt_waits_until_the_first_has_stopped(machine: StepMachine) -> None:
    add_and_ask(machine, pulled("a"))
    machine.take(machine.scheduler.retry_remote("a", remote_prefill("t-a", attempt=1)))
    machine.step()
    assert machine.connector.pulls["t-a"].attempt == 0
    machine.take(machine.scheduler.retry_remote("a", remote_prefill("t-a", attempt=2)))
    machine.connector.finish("t-a")
    machine.poll_connector()
    machine.step()
    assert machine.connector.pulls["t-a"].attempt == 2
    machine.supply_first_token("a")
    finish(machine)
    assert [(r.ok, r.attempt) for r in machine.clients["a"].kv_results] == [(True, 2)]


def test_the_end_of_one_attempt_is_not_told_of_the_next(machine: StepMachine) -> None:
    """Reports name no attempts: all are taken in before a step begins another one."""
    client = add_and_ask(machine, pulled("a"))
    machine.connector.fail("t-a")
    machine.take(machine.scheduler.retry_remote("a", remote_prefill("t-a", attempt=1)))
    machine.poll_connector()
    machine.step()
    assert machine.connector.pulls["t-a"].attempt == 1
    machine.supply_first_token("a")
    finish(machine)
    assert [(r.ok, r.attempt) for r in client.kv_results] == [(True, 1)]


def test_another_attempt_of_a_pull_that_waits_for_blocks() -> None:
    machine = StepMachine(make_config(), num_blocks=4)
    add_and_ask(machine, pulled("a", 14))
    machine.add(pulled("b", 14))
    machine.step()
    machine.take(machine.scheduler.retry_remote("b", remote_prefill("t-b", attempt=1)))
    machine.supply_first_token("a")
    machine.supply_first_token("b")
    finish(machine)
    assert [(r.ok, r.attempt) for r in machine.clients["b"].kv_results] == [(True, 1)]


def test_a_first_token_while_the_prompt_is_computed_here(machine: StepMachine) -> None:
    """The client has it already: the engine must go on behind it and not say it again."""
    add_and_ask(machine, pulled("a"))
    machine.take(machine.scheduler.prefill_locally("a"))
    machine.schedule()
    machine.supply_first_token("a")
    finish(machine)
    assert len(machine.clients["a"].tokens) == 8


def test_a_first_token_after_output_is_ignored(machine: StepMachine) -> None:
    client = add_and_ask(machine, pulled("a"))
    machine.take(machine.scheduler.prefill_locally("a"))
    while not client.tokens:
        machine.step()
    machine.take(machine.scheduler.supply_first_token("a", client.expected[0]))
    finish(machine)


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_abort_while_receiving_keeps_the_blocks(machine: StepMachine, moves: int) -> None:
    client = add_and_ask(machine, pulled("a", 12))
    for _ in range(moves):
        machine.connector.advance("t-a")
    machine.supply_first_token("a")
    # It may be complete, with the report still on its way: then nobody writes any more.
    in_motion = "t-a" in machine.connector.pulls
    machine.abort("a")
    assert client.finish_reason == "abort"
    stats = machine.scheduler.stats()
    assert stats.num_delayed_frees == int(in_motion)
    assert stats.num_free_blocks == (28 if in_motion else 32)
    finish(machine)


def test_abort_after_arrival_and_after_failure(machine: StepMachine) -> None:
    for name, ends_well in (("a", True), ("b", False)):
        add_and_ask(machine, pulled(name))
        if ends_well:
            receive(machine, name)
        else:
            machine.connector.fail(f"t-{name}")
            machine.poll_connector()
        machine.abort(name)
        assert machine.scheduler.check_empty() == []
    finish(machine)


def test_late_advice_for_a_request_that_ended(machine: StepMachine) -> None:
    add_and_ask(machine, pulled("a"))
    machine.abort("a")
    scheduler = machine.scheduler
    for outputs in (
        scheduler.supply_first_token("a", 3),
        scheduler.retry_remote("a", remote_prefill("t-a", attempt=1)),
        scheduler.prefill_locally("a"),
    ):
        assert outputs.outputs == []
        assert outputs.kv_results == []
    finish(machine)
