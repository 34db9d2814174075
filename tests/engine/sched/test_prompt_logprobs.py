"""Requests that want log probabilities of their prompt compute all of it, here or at a peer.

`StepMachine` checks that what comes is complete and belongs to the prompt."""

from __future__ import annotations

import pytest

from tests.engine.sched.factories import make_config, make_request, remote_prefill
from tests.engine.sched.step_machine import Client, StepMachine

PROMPT = [(5 * i + 11) % 60 + 1 for i in range(14)]


def finish(machine: StepMachine) -> None:
    machine.finish()
    machine.check_all_done()


def machine_of(num_blocks: int = 32, **scheduler: int) -> StepMachine:
    return StepMachine(make_config(**scheduler), num_blocks=num_blocks, depth=2)


@pytest.mark.parametrize("budget", [3, 64])
def test_nothing_of_the_prompt_comes_from_the_cache(budget: int) -> None:
    machine = machine_of(max_num_batched_tokens=budget)
    machine.add(make_request("a", PROMPT))
    finish(machine)
    scored = machine.add(make_request("b", PROMPT, prompt_logprobs=0))
    finish(machine)
    plain = machine.add(make_request("c", PROMPT))
    finish(machine)
    assert (scored.num_cached_tokens, plain.num_cached_tokens) == (0, 12)
    assert len(scored.prompt_ranks) == len(PROMPT) - 1


def test_a_prompt_of_one_token_has_none() -> None:
    machine = machine_of()
    client = machine.add(make_request("a", [5], prompt_logprobs=2))
    finish(machine)
    assert (client.prompt_ranks, len(client.tokens)) == ([], 8)


def test_a_preempted_request_is_not_asked_again() -> None:
    """Its output exists, so its prompt may come from the cache."""
    machine = machine_of(num_blocks=8)
    for name in "ab":
        machine.add(
            make_request(name, PROMPT[: 6 + ord(name) % 2], prompt_logprobs=0, max_tokens=16)
        )
    told = []
    while machine.scheduler.has_unfinished_requests():
        step = machine.step()
        told += [new.sampling.prompt_logprobs for new in step.new_reqs] if step else []
    finish(machine)
    assert machine.scheduler.stats().num_preemptions > 0
    assert told[:2] == [0, 0] and set(told[2:]) == {None}


def test_results_of_an_aborted_request_are_dropped() -> None:
    machine = machine_of()
    client = machine.add(make_request("a", PROMPT, prompt_logprobs=0))
    machine.schedule()
    machine.run()
    machine.abort("a")
    machine.settle()
    finish(machine)
    assert client.prompt_ranks == []


def pull(machine: StepMachine) -> Client:
    client = machine.add(make_request("a", PROMPT, prompt_logprobs=0, kv=remote_prefill("t-a")))
    machine.step()
    machine.connector.finish("t-a")
    machine.poll_connector()
    return client


def test_a_peer_gives_them_with_the_first_token() -> None:
    machine = machine_of()
    client = pull(machine)
    machine.supply_first_token("a")
    finish(machine)
    assert client.prompt_ranks == []
    assert machine.scheduler.stats().prompt_tokens_computed == 0


def test_kv_without_a_first_token_is_not_enough() -> None:
    """The peer is lost; computing the last token alone would give the answer, but nothing of the
    prompt."""
    machine = machine_of()
    client = pull(machine)
    machine.scheduler.prefill_locally("a")
    finish(machine)
    assert len(client.prompt_ranks) == len(PROMPT) - 1
    assert machine.scheduler.stats().prompt_tokens_computed == len(PROMPT)
