"""Choices of one prompt, stepped by hand: the prompt is computed or pulled once, its blocks are
shared, and every choice is the request with its seed alone.

The step machine compares every token and every block's number of users after each move.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.contracts.request import RequestStatus
from engine.kv_cache.block import KVCacheBlock
from engine.sched.choices.forks import Forks
from engine.sched.scheduler import Scheduler
from tests.engine.sched.factories import make_config, make_request, remote_prefill
from tests.engine.sched.step_machine import StepMachine
from tests.engine.sched.test_random_steps import Traffic


def prompt(length: int, first: int = 1) -> list[int]:
    return [first + i % 50 for i in range(length)]


def machine_of(num_blocks: int = 64, *, depth: int = 2, **config: object) -> StepMachine:
    settings: dict[str, object] = {"enable_prefix_caching": False, **config}
    return StepMachine(make_config(**settings), num_blocks, depth=depth)  # type: ignore[arg-type]


def blocks_of(machine: StepMachine, request_id: str) -> list[KVCacheBlock]:
    return list(machine.scheduler._kv_cache.get_blocks(request_id).tables[0])


def run_until_all_decode(machine: StepMachine, names: list[str]) -> None:
    for _ in range(20):
        machine.step()
        if all(machine.clients[name].tokens[1:] for name in names):
            return
    raise AssertionError("not all decode")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 14])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once_and_its_full_blocks_are_shared(
    length: int, caching: bool
) -> None:
    machine = machine_of(enable_prefix_caching=caching)
    machine.add(make_request("a", prompt(length), num_choices=4, max_tokens=9))
    names = [f"a.{i}" for i in range(4)]
    run_until_all_decode(machine, names)
    tables = [blocks_of(machine, name) for name in names]
    num_full, partial = divmod(length, 4)
    for table in tables:
        assert table[:num_full] == tables[0][:num_full]
        assert all(block.ref_cnt == 4 for block in table[:num_full])
        assert all(block.ref_cnt == 1 for block in table[num_full:])
    assert machine.scheduler.stats().num_free_blocks == 64 - num_full - sum(
        len(table) - num_full for table in tables
    )
    machine.finish()
    machine.check_all_done()
    stats = machine.scheduler.stats()
    assert stats.prompt_tokens_computed == length
    assert stats.generation_tokens == 4 * 9
    # The last choice takes the partial block itself.
    assert num_copies(machine) == (3 if partial else 0)


def num_copies(machine: StepMachine) -> int:
    return machine.worker.num_copies


def test_a_prompt_in_chunks_is_one_prompt() -> None:
    machine = machine_of(max_num_batched_tokens=8, long_prefill_token_threshold=5)
    machine.add(make_request("a", prompt(23), num_choices=5, max_tokens=6))
    machine.add(make_request("b", prompt(9, 20), max_tokens=6))
    machine.finish()
    machine.check_all_done()
    assert machine.scheduler.stats().prompt_tokens_computed == 23 + 9


def test_choices_wait_for_rows_with_their_prompt_s_blocks() -> None:
    """More choices than rows: nothing is computed again, and what comes later waits."""
    machine = machine_of(max_num_seqs=2)
    machine.add(make_request("a", prompt(13), num_choices=8, max_tokens=5))
    run_until_all_decode(machine, ["a.0", "a.1"])
    machine.add(make_request("later", prompt(5, 30), max_tokens=2))
    assert [bool(machine.clients[f"a.{i}"].tokens) for i in range(8)] == [True] * 8
    assert machine.scheduler.stats().num_waiting == 7
    machine.finish()
    machine.check_all_done()
    stats = machine.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.num_preemptions) == (13 + 5, 0)
    assert set(machine.ended[:2]) == {"a.0", "a.1"}
    assert machine.ended[-1] == "later"


def test_a_full_cache_gives_up_what_choices_share_and_they_compute_it_again() -> None:
    """The prompt fills the cache: no choice can have a block of its own."""
    machine = machine_of(4, max_model_len=16)
    machine.add(make_request("a", prompt(15), num_choices=3, max_tokens=1))
    machine.add(make_request("b", prompt(14, 9), num_choices=3, max_tokens=2))
    machine.finish()
    machine.check_all_done()
    assert machine.scheduler.stats().prompt_tokens_computed == 15 + 14 + 3 * 14


def test_a_choice_that_is_preempted_leaves_the_others_their_blocks() -> None:
    machine = machine_of(8, max_model_len=32)
    machine.add(make_request("a", prompt(12), num_choices=3, max_tokens=14))
    run_until_all_decode(machine, ["a.0", "a.1", "a.2"])
    shared = blocks_of(machine, "a.0")[:3]
    while machine.scheduler.stats().num_preemptions == 0:
        machine.step()
    machine.settle()
    assert [block.ref_cnt for block in shared] == [2, 2, 2]
    machine.finish()
    machine.check_all_done()
    assert machine.scheduler.stats().prompt_tokens_computed > 12


def test_all_first_tokens_may_be_the_last() -> None:
    machine = machine_of()
    machine.add(make_request("a", prompt(6), num_choices=4, max_tokens=1))
    machine.step()
    machine.settle()
    machine.check_all_done()
    assert all(machine.clients[f"a.{i}"].finish_reason == "length" for i in range(4))
    machine.add(make_request("b", prompt(6), num_choices=3, seed=3, max_tokens=9))
    stop = machine.clients["b.1"].expected[0]
    machine.add(
        make_request("c", prompt(6), num_choices=3, seed=3, max_tokens=9, stop_token_ids=(stop,))
    )
    machine.finish()
    machine.check_all_done()
    assert machine.clients["c.1"].tokens == [stop]
    assert machine.clients["c.1"].finish_reason == "stop"
    assert machine.scheduler.stats().num_waiting == 0


def test_what_cannot_run_is_refused_for_each_choice() -> None:
    machine = machine_of(4, max_model_len=16)
    machine.add(make_request("a", prompt(16), num_choices=2))
    assert [machine.clients[name].finish_reason for name in ("a.0", "a.1")] == ["error"] * 2
    assert "too long" in machine.clients["a.1"].error
    machine.check_all_done()
    with pytest.raises(ValueError, match=r"'b\.1' exists"):
        machine.scheduler.add_request(make_request("b.1", prompt(3)))
        machine.scheduler.add_request(make_request("b", prompt(3), num_choices=2))


def test_prompt_log_probabilities_come_once_and_concern_every_choice() -> None:
    machine = machine_of(enable_prefix_caching=True, max_num_batched_tokens=6)
    for name in ("a", "b"):
        machine.add(make_request(name, prompt(11), num_choices=3, max_tokens=4, prompt_logprobs=0))
        machine.finish()
    machine.check_all_done()
    assert all(len(machine.clients[f"b.{i}"].prompt_ranks) == 10 for i in range(3))
    assert machine.scheduler.stats().prompt_tokens_computed == 22


# KV from a peer ---------------------------------------------------------------------------------


def pulled(machine: StepMachine, length: int = 13, num_choices: int = 4) -> None:
    machine.add(make_request("a", prompt(length), kv=remote_prefill("t"), num_choices=num_choices))
    machine.step()


def receive(machine: StepMachine) -> None:
    while "t" in machine.connector.pulls:
        machine.connector.advance("t")
    machine.poll_connector()


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("token_first", [True, False])
def test_a_prompt_is_pulled_once(length: int, token_first: bool) -> None:
    machine = machine_of()
    pulled(machine, length)
    if token_first:
        machine.supply_first_token("a")
    receive(machine)
    if not token_first:
        assert machine.scheduler.stats().num_waiting == 0
        machine.supply_first_token("a")
    machine.finish()
    machine.check_all_done()
    stats = machine.scheduler.stats()
    assert stats.prompt_tokens_computed == 0
    assert stats.prompt_tokens_transferred == length
    assert machine.clients["a"].kv_results[0].ok


def test_first_tokens_outlive_a_pull_that_fails() -> None:
    """The prompt is computed here, and nobody draws again."""
    machine = machine_of()
    pulled(machine)
    machine.supply_first_token("a")
    machine.connector.fail("t")
    machine.poll_connector()
    machine.take(machine.scheduler.prefill_locally("a"))
    step = machine.step()
    assert step is not None
    assert [new.sibling_seeds for new in step.new_reqs] == [()]
    machine.finish()
    machine.check_all_done()


def test_kv_without_first_tokens_costs_one_token_of_the_prompt() -> None:
    machine = machine_of()
    pulled(machine)
    receive(machine)
    machine.take(machine.scheduler.prefill_locally("a"))
    machine.finish()
    machine.check_all_done()
    assert machine.scheduler.stats().prompt_tokens_computed == 1


def test_a_prompt_that_is_computed_here_takes_late_first_tokens_without_beginning_anew() -> None:
    machine = machine_of(max_num_batched_tokens=5)
    pulled(machine)
    machine.take(machine.scheduler.prefill_locally("a"))
    machine.connector.finish("t")
    machine.poll_connector()
    machine.step()
    machine.supply_first_token("a")
    machine.finish()
    machine.check_all_done()
    stats = machine.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.num_preemptions) == (13, 0)


def test_a_pull_ends_with_the_last_choice_that_waits_for_it() -> None:
    machine = machine_of()
    pulled(machine, num_choices=3)
    for name in ("a.1", "a.0"):
        machine.abort(name)
    assert machine.connector.pulls
    machine.supply_first_token("a")
    assert machine.clients["a.2"].tokens == machine.clients["a.2"].expected[:1]
    machine.abort("a.2")
    machine.connector.finish("t")
    machine.poll_connector()
    machine.settle()
    machine.check_all_done()


# Aborts -----------------------------------------------------------------------------------------


def state_of(scheduler: Scheduler, name: str) -> str:
    """Returns where a choice is that an abort would find."""
    request = scheduler._requests[name]
    fork = scheduler._forks._of_choice.get(name)
    if fork is not None:
        if fork.is_shared:
            return "waits for a row"
        status = fork.prompt.status
        return f"prompt {'pulls' if status is RequestStatus.WAITING_FOR_REMOTE_KVS else 'here'}"
    return {RequestStatus.RUNNING: "runs"}.get(request.status, "computes again")


@pytest.mark.parametrize(("seed", "decode_query_len"), [(0, 1), (1, 3)])
def test_ten_thousand_aborts_of_single_choices(seed: int, decode_query_len: int) -> None:
    """Choices are aborted one at a time, wherever they are, until 10,000 were (5,000 in each of
    two runs). In the end nobody holds a block."""
    rng = random.Random(seed)
    config = make_config(
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=40,
        enable_prefix_caching=bool(seed),
        decode_query_len=decode_query_len,
    )
    machine = StepMachine(config, 14, depth=2, seed=seed)
    scheduler, aborted = machine.scheduler, Counter[str]()
    num_added = 0
    while aborted.total() < 5000:
        live = [name for name in scheduler._requests if "." in name]
        if len(live) < 14:
            kv = remote_prefill(f"t-{num_added}") if rng.random() < 0.5 else None
            length, count = rng.randint(1, 20), rng.randint(2, 8)
            machine.add(
                make_request(
                    f"{num_added}", prompt(length, rng.randint(1, 2)), kv=kv, num_choices=count,
                    max_tokens=rng.randint(2, 18),
                )
            )  # fmt: skip
            num_added += 1
        for name in rng.sample(live, min(len(live), rng.choice([0, 0, 0, 1, 2]))):
            if name in scheduler._requests:
                aborted[state_of(scheduler, name)] += 1
                machine.abort(name)
        move_transfers(machine, rng)
        machine.step()
        forget_ended(machine)
    assert len(aborted) == 5, aborted
    assert min(aborted.values()) >= 50, aborted
    assert machine.worker.num_copies >= 500
    for name in [name for name in scheduler._requests if "." in name]:
        machine.abort(name)
    machine.finish()
    machine.check_all_done()
    assert scheduler.stats().num_free_blocks == machine.num_blocks


def move_transfers(machine: StepMachine, rng: random.Random) -> None:
    for transfer_id in machine.connector.transfer_ids():
        if rng.random() < 0.5:
            machine.connector.advance(transfer_id)
    for name, client in list(machine.clients.items()):
        is_pull = client.choices and client.request.kv_transfer_params is not None
        if is_pull and not client.tokens and not client.finish_reason and rng.random() < 0.2:
            machine.supply_first_token(name)
    machine.poll_connector()


def forget_ended(machine: StepMachine) -> None:
    """Keeps the test's own books short; prompts whose transfers are not over stay."""
    for name, client in list(machine.clients.items()):
        if client.finish_reason and not machine.connector.transfer_ids():
            del machine.clients[name]


def test_the_traffic_of_random_steps_is_rough_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64)
    totals = Counter[str]()
    reclaim = Forks.reclaim

    def counted(forks: Forks) -> bool:
        found = reclaim(forks)
        totals["reclaimed"] += found
        return found

    monkeypatch.setattr(Forks, "reclaim", counted)
    for seed in range(8):
        machine = StepMachine(config, 13, depth=2, seed=seed)
        Traffic(machine, seed, ["choices", "local", "pull"]).run()
        totals["copied"] += machine.worker.num_copies
        totals["transferred"] += machine.scheduler.stats().prompt_tokens_transferred
        choices = [client for client in machine.clients.values() if client.prompt is not None]
        totals["aborted"] += sum(client.finish_reason == "abort" for client in choices)
        totals["done"] += sum(client.finish_reason in ("stop", "length") for client in choices)
    assert min(totals[name] for name in ("reclaimed", "copied", "aborted", "done")) >= 10, totals
