"""Any other request gets what the idle class holds, and only as much as it lacks."""

from __future__ import annotations

import pytest

from engine.contracts.request import Request
from engine.contracts.request_spec import IDLE_PRIORITY
from tests.engine.sched.factories import make_config, make_request, remote_prefill
from tests.engine.sched.step_machine import Client, StepMachine


def batch(name: str, first: int, num_prompt: int = 40) -> Request:
    return make_request(name, [first] * num_prompt, max_tokens=40, priority=IDLE_PRIORITY)


def machine_with(
    *idle: Request, num_blocks: int = 32, depth: int = 2, **limits: int
) -> StepMachine:
    """Has each of `idle` running, with three tokens at least."""
    machine = StepMachine(make_config(**limits), num_blocks, depth=depth)
    for request in idle:
        client = machine.add(request)
        while len(client.tokens) < 3:
            machine.step()
    return machine


def num_preempted(machine: StepMachine) -> int:
    return machine.scheduler.stats().num_preemptions


def steps_until_first(machine: StepMachine, client: Client) -> int:
    count = 0
    while not client.tokens:
        machine.step()
        count += 1
    return count


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_without_blocks_takes_those_of_the_newest(depth: int) -> None:
    """Two hold 11 of 32 blocks each: one of them is enough for a prompt of 15 and headroom."""
    machine = machine_with(batch("older", 4), batch("newer", 5), depth=depth)
    others = machine.add(make_request("others", [9] * 60, max_tokens=3))
    assert steps_until_first(machine, others) <= 2 * depth + 1
    assert num_preempted(machine) == 1
    assert len(machine.clients["older"].tokens) > 3, "it went on"
    machine.finish()
    machine.check_all_done()


def test_nor_does_a_prompt_of_the_same_class() -> None:
    machine = machine_with(batch("older", 4), batch("newer", 5), num_blocks=44)
    machine.add(batch("last", 6, num_prompt=100))
    machine.finish()
    machine.check_all_done()
    assert machine.ended[-1] == "last" and num_preempted(machine) == 0


def test_a_pull_begins_where_blocks_were_taken() -> None:
    machine = machine_with(batch("older", 4), batch("newer", 5), depth=1)
    params = remote_prefill("t")
    machine.add(make_request("pulled", [9] * 60, max_tokens=3, kv=params))
    for _ in range(3):
        machine.step()
    assert machine.scheduler.stats().num_waiting_for_remote_kvs == 1
    assert num_preempted(machine) == 1


def test_a_row_is_taken_where_none_is_free() -> None:
    machine = machine_with(batch("older", 4), batch("newer", 5), num_blocks=99, max_num_seqs=2)
    others = machine.add(make_request("others", [9] * 20, max_tokens=3))
    assert steps_until_first(machine, others) <= 3
    assert num_preempted(machine) == 1
    machine.finish()
    machine.check_all_done()


def test_no_more_is_taken_than_helps() -> None:
    """Others hold what lacks: the batch would lose its blocks for nothing."""
    machine = StepMachine(make_config(), 32, depth=1)
    held = machine.add(make_request("held", [3] * 60, max_tokens=60))
    small = machine.add(batch("small", 4, num_prompt=8))
    while len(small.tokens) < 3:
        machine.step()
    machine.add(make_request("large", [9] * 100, max_tokens=3))
    for _ in range(4):
        machine.step()
    assert not held.finish_reason
    assert num_preempted(machine) == 0
    machine.finish()
    machine.check_all_done()
