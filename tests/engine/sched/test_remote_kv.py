"""KV from and to other nodes, stepped by hand: every order of events, every way to fail."""

from __future__ import annotations

import pytest

import engine.sched.pulls as pulls_module
from engine.request import Request, RequestStatus
from engine.sched.scheduler import Scheduler
from tests.engine.sched.factories import (
    make_config,
    make_request,
    remote_decode,
    remote_prefill,
)
from tests.engine.sched.step_machine import Client, StepMachine


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + 11 + salt) % 60 + 1 for i in range(length)]


def pulled(name: str, length: int = 10, **more: object) -> Request:
    return make_request(name, prompt(length, ord(name[0])), kv=remote_prefill(f"t-{name}"), **more)


def add_and_ask(machine: StepMachine, request: Request) -> Client:
    """The pull has begun."""
    client = machine.add(request)
    machine.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert f"t-{request.request_id}" in machine.connector.pulls
    return client


def receive(machine: StepMachine, name: str) -> None:
    machine.connector.finish(f"t-{name}")
    machine.poll_connector()


def finish(machine: StepMachine) -> None:
    machine.finish()
    machine.check_all_done()


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> StepMachine:
    return StepMachine(make_config(), num_blocks=32, depth=2)


# Decode node ------------------------------------------------------------------------------------


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
    assert step.prefill_chunks == [(new.row, 1)]
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


@pytest.mark.parametrize("has_part", [True, False])
def test_a_failed_pull_is_reported_and_tried_again(machine: StepMachine, has_part: bool) -> None:
    """What came of it stays, if it is known to be complete."""
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
    """Behind the tokens whose KV is complete."""
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
    """In its blocks, behind what is complete of them."""
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
    assert step.new_reqs[0].block_ids == pull.block_ids
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
    monkeypatch.setattr(pulls_module, "_STOP_S", 0.0)
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
    assert step.prefill_chunks == [(0, 1)]
    finish(machine)


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
    """One row, taken by a request that needs the blocks of KV that waits for that very row."""
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


def test_an_engine_without_a_connector_refuses_kv_parameters() -> None:
    scheduler = Scheduler(make_config(), 8, None)
    outputs = scheduler.add_request(pulled("a")).outputs
    assert outputs[0].finish_reason == "error"
    assert "no KV transfer" in outputs[0].error
    assert scheduler.check_empty() == []


# Prefill node -----------------------------------------------------------------------------------


def offered(name: str, length: int = 10) -> Request:
    tokens = prompt(length, ord(name[0]))
    return make_request(name, tokens, kv=remote_decode(f"t-{name}"), max_tokens=1)


def test_an_offer_from_first_chunk_to_release() -> None:
    machine = StepMachine(make_config(max_num_batched_tokens=4), num_blocks=8)
    client = machine.add(offered("a"))
    steps = [machine.step() for _ in range(3)]
    assert [step.prefill_chunks for step in steps if step] == [[(0, 4)], [(0, 4)], [(0, 2)]]
    assert all(step.kv is not None and step.kv.save_kv for step in steps if step)
    assert machine.connector.offers["t-a"].chunks == [(0, 4), (1, 8), (2, 10)]
    machine.settle()
    assert client.finish_reason == "length"
    assert len(client.tokens) == 1
    assert machine.scheduler.check_empty() != []
    assert machine.scheduler.stats().num_delayed_frees == 1
    machine.connector.advance("t-a")
    machine.poll_connector()
    assert machine.scheduler.stats().num_delayed_frees == 0
    assert client.kv_results == []
    machine.connector.advance("t-a")
    machine.poll_connector()
    assert [(r.ok, r.attempt) for r in client.kv_results] == [(True, 0)]
    finish(machine)


def test_a_cached_prefix_is_handed_over_at_once() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(make_request("x", prompt(10, ord("a"))))
    machine.finish()
    client = machine.add(offered("a"))
    machine.step()
    offer = machine.connector.offers["t-a"]
    assert (offer.num_cached, offer.chunks) == (8, [(machine.scheduler._running.step_id, 10)])
    finish(machine)
    assert client.num_cached_tokens == 8


def test_everything_staged_before_the_end_needs_no_delay() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(offered("a"))
    machine.schedule()
    machine.run()
    machine.connector.finish("t-a")
    machine.poll_connector()
    machine.update()
    assert machine.scheduler.check_empty() == []
    assert machine.clients["a"].kv_results[0].ok


@pytest.mark.parametrize("when", ["queued", "running", "ended"])
def test_abort_of_an_offer(when: str) -> None:
    machine = StepMachine(make_config(), num_blocks=8, depth=2)
    client = machine.add(offered("a"))
    assert "t-a" in machine.connector.offers
    if when != "queued":
        machine.schedule()
    if when == "ended":
        machine.settle()
    machine.abort("a")
    machine.settle()
    assert machine.scheduler.stats().num_delayed_frees == 1
    finish(machine)
    assert client.finish_reason == ("length" if when == "ended" else "abort")
    assert client.kv_results == []


def test_an_offer_that_fails_is_reported_and_frees() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    client = machine.add(offered("a"))
    machine.step()
    machine.settle()
    machine.connector.fail("t-a")
    machine.poll_connector()
    assert [r.ok for r in client.kv_results] == [False]
    finish(machine)


@pytest.mark.parametrize("depth", [1, 2])
def test_offers_are_never_preempted(depth: int) -> None:
    """A peer reads their blocks: whoever needs room, however urgent, waits for them instead."""
    config = make_config(
        policy="priority", long_prefill_token_threshold=1, enable_prefix_caching=False
    )
    machine = StepMachine(config, num_blocks=10, depth=depth)
    client = machine.add(make_request("a", prompt(28), kv=remote_decode("t-a"), max_tokens=1))
    machine.step()
    machine.add(make_request("local", prompt(8), max_tokens=20, priority=-1))
    waited = 0
    while not client.finish_reason:
        step = machine.step()
        waited += step is not None and step.decode_remove != []
    assert waited == 1
    assert client.request.num_preemptions == 0
    finish(machine)


def test_a_newer_attempt_replaces_an_offer() -> None:
    """Its end is reported under the transfer's name only once; both requests' blocks come back."""
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(offered("a"))
    machine.step()
    machine.settle()
    assert machine.scheduler.stats().num_delayed_frees == 1
    del machine.connector.offers["t-a"]
    again = make_request("a2", prompt(10, ord("a")), kv=remote_decode("t-a"), max_tokens=1)
    machine.add(again)
    machine.abort("a")
    machine.step()
    machine.settle()
    assert "t-a" in machine.connector.offers
    finish(machine)
    assert [r.ok for r in machine.clients["a2"].kv_results] == [True]
