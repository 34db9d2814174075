"""A request of which one token is left to compute decodes in its first step: no chunk of a prompt
keeps that step from being a graph of decodes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contracts.request_spec import IDLE_PRIORITY
from engine.contracts.scheduler_output import SchedulerOutput
from tests.engine.sched.factories import (
    BLOCK_SIZE,
    kv_layers,
    make_config,
    make_request,
    remote_decode,
    with_states,
)
from tests.engine.sched.remote_requests import pulled, receive
from tests.engine.sched.step_machine import StepMachine

PROMPT = [*range(1, 2 * BLOCK_SIZE + 2)]
"""All of it but the last token is found once it was computed."""


def machine_with_prefix(num_blocks: int = 60, depth: int = 1, **settings: Any) -> StepMachine:
    """Returns a machine that has computed the prompt, and in which another request decodes."""
    machine = StepMachine(make_config(**settings), num_blocks, depth=depth)
    machine.add(make_request("first", PROMPT, max_tokens=2))
    machine.finish()
    machine.add(make_request("beside", [60, 61], max_tokens=60))
    for _ in range(3):
        machine.step()
    return machine


def next_step(machine: StepMachine) -> SchedulerOutput:
    step = machine.step()
    assert step is not None
    return step


@pytest.mark.parametrize(("query_len", "has_states"), [(1, False), (1, True), (4, False)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_is_cached_decodes_at_once(
    query_len: int, depth: int, has_states: bool
) -> None:
    layers = with_states(kv_layers(None)) if has_states else ()
    machine = machine_with_prefix(depth=depth, decode_query_len=query_len, kv_layers=layers)
    computed = machine.scheduler.stats().prompt_tokens_computed
    client = machine.add(make_request("again", PROMPT, max_tokens=9))
    step = next_step(machine)
    (new,) = step.new_reqs
    assert new.num_computed_tokens == len(PROMPT) - 1 and step.decode_add == [new.row]
    assert not step.prefill_chunks
    machine.finish()
    assert client.tokens == client.expected and client.num_cached_tokens == len(PROMPT) - 1
    assert machine.scheduler.stats().prompt_tokens_computed == computed + 1
    machine.check_all_done()


@pytest.mark.parametrize("depth", [1, 2])
def test_states_that_it_begins_with_are_free_behind_its_first_step(depth: int) -> None:
    """They are copied in that step. Blocks that nothing but a cache holds may be displaced."""
    machine = machine_with_prefix(depth=depth, kv_layers=with_states(kv_layers(None)))
    machine.add(make_request("again", PROMPT, max_tokens=9))
    machine.add(make_request("aborted", PROMPT, max_tokens=9))
    step = next_step(machine)
    kv_cache = machine.scheduler._kv_cache
    blocks = kv_cache.get_blocks("again")
    assert len(step.decode_add) == 2 and step.block_copies
    if depth > 1:
        assert blocks.borrowed
    machine.abort("aborted")
    machine.settle()
    assert not blocks.borrowed
    machine.finish()
    machine.check_all_done()


@pytest.mark.parametrize("query_len", [1, 4])
def test_blocks_that_it_fills_are_found(query_len: int) -> None:
    """The first token of a pulled prompt is the last of its third block."""
    machine = StepMachine(make_config(decode_query_len=query_len), 60)
    tokens = [*range(1, 3 * BLOCK_SIZE)]
    client = machine.add(pulled("a", len(tokens)))
    machine.schedule()
    machine.poll_connector()
    receive(machine, "a")
    machine.supply_first_token("a")
    step = machine.step()
    assert step is not None and (step.prefill_chunks, step.decode_add) == ([], [0])
    known = [*client.request.all_token_ids[: 3 * BLOCK_SIZE], 63]
    later = machine.add(make_request("later", known, max_tokens=2))
    machine.finish()
    assert later.num_cached_tokens == 3 * BLOCK_SIZE
    machine.check_all_done()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_choices": 2, "seed": 1},
        {"prompt_logprobs": 0},
        {"kv": remote_decode("t"), "max_tokens": 1},
    ],
    ids=["choices", "log probabilities", "a peer pulls it"],
)
def test_who_wants_more_of_the_last_token_computes_a_prompt(changes: dict[str, Any]) -> None:
    machine = machine_with_prefix(decode_query_len=4)
    fields = {"max_tokens": 5, **changes}
    client = machine.add(make_request("again", PROMPT, **fields))
    step = next_step(machine)
    assert step.prefill_chunks and not step.decode_add
    machine.finish()
    assert client.choices or client.tokens == client.expected
    machine.check_all_done()


@pytest.mark.parametrize("query_len", [1, 4])
def test_choices_decode_at_once_behind_their_prompt(query_len: int) -> None:
    machine = machine_with_prefix(decode_query_len=query_len)
    client = machine.add(make_request("again", PROMPT, num_choices=3, seed=1, max_tokens=5))
    assert next_step(machine).prefill_chunks
    steps = [next_step(machine) for _ in range(3)]
    assert not any(step.prefill_chunks for step in steps)
    assert sum(len(step.decode_add) for step in steps) == 3
    machine.finish()
    assert all(choice.tokens == choice.expected for choice in client.choices)
    machine.check_all_done()


def test_a_token_without_a_past_is_a_prompt() -> None:
    machine = machine_with_prefix()
    machine.add(make_request("short", [7], max_tokens=2))
    step = next_step(machine)
    assert [count for _, count in step.prefill_chunks] == [1] and not step.decode_add
    machine.finish()


def test_a_step_without_room_for_drafts_computes_a_prompt() -> None:
    machine = machine_with_prefix(decode_query_len=4, max_num_batched_tokens=12)
    machine.add(make_request("other", [50] * 6, max_tokens=5))
    machine.add(make_request("again", PROMPT, max_tokens=5))
    step = next_step(machine)
    assert [count for _, count in step.prefill_chunks] == [6, 1] and not step.decode_add
    machine.finish()
    machine.check_all_done()


def test_without_blocks_for_drafts_it_computes_a_prompt() -> None:
    """Eight tokens a step need a block more than the prompt has, and a peer pulls that."""
    machine = StepMachine(make_config(decode_query_len=8), 4)
    machine.add(make_request("first", PROMPT, max_tokens=1))
    machine.finish()
    machine.add(make_request("pulled", [40, 41], max_tokens=1, kv=remote_decode("t")))
    machine.step()
    machine.settle()
    client = machine.add(make_request("again", PROMPT, max_tokens=2))
    step = next_step(machine)
    assert [count for _, count in step.prefill_chunks] == [1] and not step.decode_add
    machine.finish()
    assert client.tokens == client.expected and client.num_cached_tokens == 8
    machine.check_all_done()


def test_the_idle_class_sits_out_with_its_last_token() -> None:
    machine = machine_with_prefix(itl_objective_ms=1000.0)
    machine.add(make_request("long", [50] * 100, max_tokens=2))
    machine.add(make_request("idle", PROMPT, max_tokens=2, priority=IDLE_PRIORITY))
    step = next_step(machine)
    assert len(step.new_reqs) == 1 and step.prefill_chunks
    machine.finish()
    machine.check_all_done()
