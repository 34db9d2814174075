"""KV for other nodes, stepped by hand."""

from __future__ import annotations

import pytest

from engine.contracts.request import Request
from tests.engine.sched.factories import (
    make_config,
    make_request,
    remote_decode,
)
from tests.engine.sched.remote_requests import finish, prompt
from tests.engine.sched.step_machine import StepMachine


def exported(name: str, length: int = 10) -> Request:
    tokens = prompt(length, ord(name[0]))
    return make_request(name, tokens, kv=remote_decode(f"t-{name}"), max_tokens=1)


def test_an_export_from_first_chunk_to_release() -> None:
    machine = StepMachine(make_config(max_num_batched_tokens=4), num_blocks=8)
    client = machine.add(exported("a"))
    steps = [machine.step() for _ in range(3)]
    assert [step.prefill_chunks for step in steps if step] == [[(0, 4)], [(0, 4)], [(0, 2)]]
    assert all(step.kv is not None and step.kv.save_kv for step in steps if step)
    assert machine.connector.exports["t-a"].chunks == [(0, 4), (1, 8), (2, 10)]
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
    client = machine.add(exported("a"))
    machine.step()
    export = machine.connector.exports["t-a"]
    assert (export.num_cached, export.chunks) == (8, [(machine.scheduler._running.step_id, 10)])
    finish(machine)
    assert client.num_cached_tokens == 8


def test_everything_staged_before_the_end_needs_no_delay() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(exported("a"))
    machine.schedule()
    machine.run()
    machine.connector.finish("t-a")
    machine.poll_connector()
    machine.update()
    assert machine.scheduler.check_empty() == []
    assert machine.clients["a"].kv_results[0].ok


@pytest.mark.parametrize("when", ["queued", "running", "ended"])
def test_abort_of_an_export(when: str) -> None:
    machine = StepMachine(make_config(), num_blocks=8, depth=2)
    client = machine.add(exported("a"))
    assert "t-a" in machine.connector.exports
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


def test_an_export_that_fails_is_reported_and_frees() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    client = machine.add(exported("a"))
    machine.step()
    machine.settle()
    machine.connector.fail("t-a")
    machine.poll_connector()
    assert [r.ok for r in client.kv_results] == [False]
    finish(machine)


def test_a_failure_that_is_read_late_is_none_of_the_next_attempts_export() -> None:
    machine = StepMachine(make_config(), num_blocks=16)
    first = machine.add(exported("a"))
    machine.connector.fail("t-a")
    again = make_request("b", prompt(10, ord("a")), kv=remote_decode("t-a", 1), max_tokens=1)
    second = machine.add(again)
    machine.poll_connector()
    assert first.kv_results == second.kv_results == []
    finish(machine)
    assert [(result.ok, result.attempt) for result in second.kv_results] == [(True, 1)]


@pytest.mark.parametrize("when", ["queued", "running"])
def test_an_export_whose_request_cannot_go_on_is_called_off(when: str) -> None:
    """The rest of its prompt is never computed, so its KV may not count as complete."""
    machine = StepMachine(make_config(max_num_batched_tokens=4), num_blocks=8)
    client = machine.add(exported("a"))
    if when == "running":
        machine.step()
    machine.take(machine.scheduler.abort_requests(["a"], "its adapter cannot be read"))
    assert (client.finish_reason, client.error) == ("error", "its adapter cannot be read")
    assert machine.connector.exports["t-a"].stopping
    finish(machine)
    assert client.kv_results == []


@pytest.mark.parametrize("depth", [1, 2])
def test_exports_are_never_preempted(depth: int) -> None:
    """A peer reads their blocks: whoever needs room, however urgent, waits for them instead."""
    config = make_config(
        policy="priority", long_prefill_token_threshold=1, enable_prefix_caching=False
    )
    machine = StepMachine(config, num_blocks=10, depth=depth)
    client = machine.add(make_request("a", prompt(28), kv=remote_decode("t-a", 1), max_tokens=1))
    machine.step()
    machine.add(make_request("local", prompt(8), max_tokens=20, priority=-1))
    waited = 0
    while not client.finish_reason:
        step = machine.step()
        waited += step is not None and step.decode_remove != []
    assert waited == 1
    assert client.request.num_preemptions == 0
    finish(machine)


def test_a_newer_attempt_replaces_an_export() -> None:
    """The end of the older one is not reported; both requests' blocks come back."""
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(exported("a"))
    machine.step()
    machine.settle()
    assert machine.scheduler.stats().num_delayed_frees == 1
    del machine.connector.exports["t-a"]
    again = make_request("a2", prompt(10, ord("a")), kv=remote_decode("t-a", 1), max_tokens=1)
    machine.add(again)
    machine.abort("a")
    machine.step()
    machine.settle()
    assert "t-a" in machine.connector.exports
    finish(machine)
    assert [r.ok for r in machine.clients["a2"].kv_results] == [True]


def test_blocks_of_an_export_that_is_replaced_while_it_is_called_off_come_back() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(exported("a"))
    machine.step()
    machine.abort("a")
    machine.settle()
    assert machine.scheduler.stats().num_delayed_frees == 1
    assert machine.connector.exports.pop("t-a").stopping
    again = make_request("a2", prompt(10, ord("a")), kv=remote_decode("t-a", 1), max_tokens=1)
    machine.add(again)
    finish(machine)
    assert [r.ok for r in machine.clients["a2"].kv_results] == [True]


def test_blocks_of_a_replaced_export_are_kept_until_the_newer_one_is_read() -> None:
    """Transfer processes stop reading for the older attempt when they are told, unheard."""
    machine = StepMachine(make_config(max_num_batched_tokens=4), num_blocks=12)
    machine.add(exported("a"))
    machine.step()
    del machine.connector.exports["t-a"]
    again = make_request("a2", prompt(10, ord("a")), kv=remote_decode("t-a", 1), max_tokens=1)
    machine.add(again)
    held = set(machine.scheduler._kv_cache.get_block_ids("a")[0])
    machine.abort("a")
    machine.settle()
    free = machine.scheduler._kv_cache.block_pool.free_queue.block_ids()
    assert not held & set(free)
    finish(machine)
    assert [r.ok for r in machine.clients["a2"].kv_results] == [True]
