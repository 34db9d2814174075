"""The scheduler stepped by hand: order, budgets, ends, and what a step message says."""

from __future__ import annotations

import msgspec
import pytest

from engine.contracts.request import RequestStatus
from engine.contracts.scheduler_output import SchedulerOutput
from engine.sched.scheduler import Scheduler
from kv_transfer.connectors.no_connector import NoConnectorScheduler
from tests.engine.sched.factories import EOS, make_config, make_request
from tests.engine.sched.fake_worker import expected_output
from tests.engine.sched.step_machine import StepMachine


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 3 + salt) % 60 + 1 for i in range(length)]


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def finish(machine: StepMachine) -> None:
    machine.finish()
    machine.check_all_done()


def test_one_request_from_prompt_to_end(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=32, depth=depth)
    client = machine.add(make_request("a", prompt(10), max_tokens=6))
    first = machine.step()
    assert first is not None
    assert first.step_id == 0
    assert [(new.row, new.prompt_len, new.num_computed_tokens) for new in first.new_reqs] == [
        (0, 10, 0)
    ]
    assert first.prefill_chunks == [(0, 10)]
    assert first.decode_add == []
    second = machine.step()
    assert second is not None
    assert second.new_reqs == []
    assert second.prefill_chunks == []
    assert second.decode_add == [0]
    third = machine.step()
    assert third == SchedulerOutput(2)
    finish(machine)
    assert client.finish_reason == "length"
    assert len(client.tokens) == 6
    assert client.num_cached_tokens == 0


def test_a_steady_decode_step_says_nothing_but_its_number() -> None:
    machine = StepMachine(make_config(block_size=16), num_blocks=32)
    for name in "abcd":
        machine.add(make_request(name, prompt(8, ord(name)), max_tokens=40))
    steps = [machine.step() for _ in range(9)]
    for step in steps[2:]:
        assert step is not None
        assert step == SchedulerOutput(step.step_id)
        assert len(msgspec.msgpack.encode(step)) < 16
    finish(machine)


def test_no_step_without_work(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=8, depth=depth)
    assert machine.schedule() is None
    machine.add(make_request("a", prompt(3), max_tokens=1))
    assert machine.schedule() is not None
    if depth == 2:
        assert machine.schedule() is None
    machine.settle()
    assert machine.schedule() is None
    machine.check_all_done()


def test_prompts_share_the_budget_in_order_of_arrival(depth: int) -> None:
    config = make_config(max_num_batched_tokens=16)
    machine = StepMachine(config, num_blocks=64, depth=depth)
    for name, length in (("a", 10), ("b", 20), ("c", 5)):
        machine.add(make_request(name, prompt(length, ord(name))))
    chunks = [step.prefill_chunks for step in (machine.step() for _ in range(3)) if step]
    assert chunks[0] == [(0, 10), (1, 6)]
    # One token of the budget is for the first request, which decodes by now.
    assert chunks[1] == [(1, 14), (2, 1)]
    assert chunks[2] == [(2, 4)]
    finish(machine)


def test_a_long_prompt_leaves_room_for_others(depth: int) -> None:
    config = make_config(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    machine = StepMachine(config, num_blocks=64, depth=depth)
    machine.add(make_request("long", prompt(40)))
    machine.add(make_request("short", prompt(6, 1)))
    step = machine.step()
    assert step is not None
    assert step.prefill_chunks == [(0, 8), (1, 6)]
    finish(machine)


def test_without_chunked_prefill_a_prompt_stays_whole(depth: int) -> None:
    config = make_config(max_num_batched_tokens=16, enable_chunked_prefill=False)
    machine = StepMachine(config, num_blocks=64, depth=depth)
    machine.add(make_request("a", prompt(10)))
    machine.add(make_request("b", prompt(12, 1)))
    step = machine.step()
    assert step is not None
    assert step.prefill_chunks == [(0, 10)]
    step = machine.step()
    assert step is not None
    assert step.prefill_chunks == [(1, 12)]
    refused = machine.add(make_request("c", prompt(17)))
    assert refused.finish_reason == "error"
    assert "chunked prefill" in refused.error
    finish(machine)


def test_no_more_rows_than_max_num_seqs(depth: int) -> None:
    machine = StepMachine(make_config(max_num_seqs=2), num_blocks=64, depth=depth)
    for name in "abcde":
        machine.add(make_request(name, prompt(4, ord(name)), max_tokens=3))
    seen = 0
    while machine.scheduler.has_unfinished_requests():
        machine.step()
        seen = max(seen, len(machine.worker.rows))
        assert machine.scheduler.stats().num_running <= 2
    assert seen == 2
    finish(machine)


def test_a_row_goes_to_the_next_request_in_the_same_message() -> None:
    machine = StepMachine(make_config(max_num_seqs=1), num_blocks=16)
    machine.add(make_request("a", prompt(4), max_tokens=1))
    machine.add(make_request("b", prompt(4, 1), max_tokens=1))
    machine.step()
    step = machine.step()
    assert step is not None
    assert step.finished_rows == [0]
    assert [(new.row, new.epoch) for new in step.new_reqs] == [(0, 2)]
    finish(machine)


def test_fcfs_ignores_priority_and_priority_does_not(depth: int) -> None:
    orders = {}
    for policy in ("fcfs", "priority"):
        machine = StepMachine(make_config(max_num_seqs=1, policy=policy), 32, depth=depth)
        for name, priority in (("first", 5), ("second", 1), ("third", 3)):
            machine.add(make_request(name, prompt(4, len(name)), priority=priority, max_tokens=2))
        order = orders[policy] = []
        while machine.scheduler.has_unfinished_requests():
            machine.step()
            for name, client in machine.clients.items():
                if client.finish_reason and name not in order:
                    order.append(name)
        finish(machine)
    assert orders == {
        "fcfs": ["first", "second", "third"],
        "priority": ["second", "third", "first"],
    }


def test_end_of_sequence_ends_and_is_the_last_token(depth: int) -> None:
    ended = 0
    for salt in range(40):
        machine = StepMachine(make_config(), num_blocks=64, depth=depth)
        client = machine.add(make_request("a", prompt(5, salt), max_tokens=60, ignore_eos=False))
        finish(machine)
        if client.finish_reason == "stop":
            ended += 1
            assert client.tokens[-1] == EOS
    assert 0 < ended < 40


def test_min_tokens_masks_ends_before(depth: int) -> None:
    def free_length(salt: int) -> int:
        request = make_request("a", prompt(5, salt), max_tokens=60, ignore_eos=False)
        return len(expected_output(request, 128))

    salt = min(range(40), key=free_length)
    assert free_length(salt) < 20
    machine = StepMachine(make_config(), num_blocks=64, depth=depth)
    client = machine.add(
        make_request("a", prompt(5, salt), max_tokens=60, min_tokens=60, ignore_eos=False)
    )
    finish(machine)
    assert len(client.tokens) == 60


def test_stop_token_ids_end_and_are_named(depth: int) -> None:
    probe = make_request("a", prompt(5), max_tokens=20)
    stop = expected_output(probe, 128)[7]
    machine = StepMachine(make_config(), num_blocks=64, depth=depth)
    machine.add(make_request("a", prompt(5), max_tokens=20, stop_token_ids=(stop,)))
    outputs = []
    while machine.scheduler.has_unfinished_requests():
        machine.schedule()
        machine.run()
        results = machine.scheduler.update_from_output(*machine.ran.popleft())
        outputs += results.outputs
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == stop
    assert outputs[-1].new_token_ids == [stop]
    assert machine.scheduler.check_empty() == []


def test_the_context_length_ends_an_output(depth: int) -> None:
    machine = StepMachine(make_config(max_model_len=20), num_blocks=64, depth=depth)
    client = machine.add(make_request("a", prompt(15), max_tokens=100))
    finish(machine)
    assert client.finish_reason == "length"
    assert len(client.tokens) == 5


def test_a_request_alone_may_fill_the_whole_cache(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=6, depth=depth)
    client = machine.add(make_request("a", prompt(15), max_tokens=100))
    finish(machine)
    assert client.finish_reason == "length"
    assert len(client.tokens) == 6 * 4 + 1 - 15


@pytest.mark.parametrize(("length", "why"), [(25, "KV cache holds only 24"), (128, "context")])
def test_what_can_never_run_is_refused_with_a_reason(length: int, why: str) -> None:
    machine = StepMachine(make_config(), num_blocks=6)
    other = machine.add(make_request("other", prompt(4)))
    client = machine.add(make_request("a", prompt(length)))
    assert client.finish_reason == "error"
    assert why in client.error
    finish(machine)
    assert other.finish_reason == "length"


def test_an_empty_prompt_is_refused() -> None:
    scheduler = Scheduler(make_config(), 8, NoConnectorScheduler())
    outputs = scheduler.add_request(make_request("a", [])).outputs
    assert [output.finish_reason for output in outputs] == ["error"]
    assert "empty" in outputs[0].error


def test_a_known_id_is_refused() -> None:
    scheduler = Scheduler(make_config(), 8, NoConnectorScheduler())
    scheduler.add_request(make_request("a", prompt(4)))
    with pytest.raises(ValueError, match="exists already"):
        scheduler.add_request(make_request("a", prompt(4)))


def test_abort_in_every_state(depth: int) -> None:
    for steps in range(7):
        machine = StepMachine(make_config(max_num_batched_tokens=8), num_blocks=32, depth=depth)
        client = machine.add(make_request("a", prompt(20), max_tokens=50))
        other = machine.add(make_request("b", prompt(5, 1), max_tokens=9))
        for _ in range(steps):
            machine.step()
        machine.abort("a")
        assert client.finish_reason == "abort"
        machine.abort("a")
        finish(machine)
        assert other.finish_reason == "length"


def test_results_out_of_order_are_refused() -> None:
    machine = StepMachine(make_config(), num_blocks=32, depth=2)
    machine.add(make_request("a", prompt(4)))
    machine.schedule()
    machine.schedule()
    machine.run()
    machine.run()
    late = machine.ran.pop()
    with pytest.raises(ValueError, match="due is 0"):
        machine.scheduler.update_from_output(*late)


def test_logprobs_travel_with_their_token() -> None:
    from engine.contracts.outputs import TokenLogprobs

    machine = StepMachine(make_config(), num_blocks=32)
    machine.add(make_request("a", prompt(4), logprobs=0, max_tokens=1))
    machine.add(make_request("b", prompt(4, 1), max_tokens=1))
    machine.schedule()
    machine.run()
    step, output = machine.ran.popleft()
    output.logprobs[0] = TokenLogprobs([output.token_ids[0]], [-0.5], 1)
    results = machine.scheduler.update_from_output(step, output)
    by_id = {out.request_id: out for out in results.outputs}
    assert by_id["a"].logprobs == [output.logprobs[0]]
    assert by_id["b"].logprobs is None


# Preemption -------------------------------------------------------------------------------------


def test_the_newest_yields_and_comes_back(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=12, depth=depth)
    for name in "abc":
        machine.add(make_request(name, prompt(8, ord(name)), max_tokens=30))
    while machine.scheduler.stats().num_preemptions == 0:
        machine.step()
    preempted = [n for n, c in machine.clients.items() if c.request.num_preemptions]
    assert preempted == ["c"]
    assert machine.clients["c"].request.status is RequestStatus.PREEMPTED
    assert not machine.clients["c"].finish_reason
    finish(machine)


def test_under_priority_the_least_urgent_yields(depth: int) -> None:
    machine = StepMachine(make_config(policy="priority"), num_blocks=12, depth=depth)
    for name, priority in (("a", 9), ("b", 1), ("c", 5)):
        machine.add(make_request(name, prompt(8, ord(name)), priority=priority, max_tokens=30))
    while machine.scheduler.stats().num_preemptions == 0:
        machine.step()
    assert [n for n, c in machine.clients.items() if c.request.num_preemptions] == ["a"]
    finish(machine)


def test_what_a_preempted_row_still_computes_is_dropped() -> None:
    """At depth 2 its blocks wait for the steps that carry it, and so does who wants them."""
    machine = StepMachine(make_config(enable_prefix_caching=False), num_blocks=8, depth=2)
    for name in "ab":
        machine.add(make_request(name, prompt(8, ord(name)), max_tokens=16))
    preempted = machine.clients["b"].request
    while preempted.num_preemptions == 0:
        machine.make_room()
        machine.schedule()
    assert machine.num_out == 1
    assert machine.scheduler._fence.num_blocks == 4
    confirmed = preempted.num_output_tokens
    machine.settle()
    assert preempted.num_output_tokens == confirmed
    assert machine.scheduler._fence.num_blocks == 0
    finish(machine)


def test_ends_found_late_cost_one_step_and_no_token() -> None:
    """At depth 2 a row that has ended runs once more; its blocks wait, the token is dropped."""
    machine = StepMachine(make_config(), num_blocks=32, depth=2)
    stop = expected_output(make_request("a", prompt(5), max_tokens=20), 128)[4]
    client = machine.add(make_request("a", prompt(5), max_tokens=20, stop_token_ids=(stop,)))
    while not client.finish_reason:
        machine.schedule()
        machine.make_room()
    assert client.finish_reason == "stop"
    assert machine.num_out == 1
    assert machine.scheduler._fence.num_blocks > 0
    finish(machine)


def test_blocks_of_the_first_step_wait_for_it() -> None:
    machine = StepMachine(make_config(), num_blocks=8)
    machine.add(make_request("a", prompt(5)))
    assert (step := machine.schedule()) is not None and step.step_id == 0
    machine.abort("a")
    assert machine.scheduler._fence.num_blocks == 2
    finish(machine)


# Prefix cache -----------------------------------------------------------------------------------


def test_an_equal_prompt_computes_only_its_rest(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=32, depth=depth)
    machine.add(make_request("a", prompt(16)))
    machine.finish()
    second = machine.add(make_request("b", prompt(16)))
    step = machine.step()
    assert step is not None
    # Three blocks of four: with all of them there would be no token left to compute.
    assert step.new_reqs[0].num_computed_tokens == 12
    assert step.prefill_chunks[0][1] == 4
    finish(machine)
    assert second.num_cached_tokens == 12
    stats = machine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (32, 12)


def test_output_is_part_of_the_next_turns_prefix(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=64, depth=depth)
    first = machine.add(make_request("a", prompt(10), max_tokens=9))
    machine.finish()
    turn_two = machine.add(make_request("b", prompt(10) + first.tokens + prompt(5)))
    finish(machine)
    # 19 tokens, of which the last has no KV: four full blocks.
    assert turn_two.num_cached_tokens == 16


def test_salts_keep_tenants_apart(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=64, depth=depth)
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        machine.add(make_request(name, prompt(16), cache_salt=salt))
        machine.finish()
    assert [c.num_cached_tokens for c in machine.clients.values()] == [0, 0, 12]
    machine.check_all_done()


def test_a_prompt_under_way_is_not_found_before_its_kv_exists() -> None:
    machine = StepMachine(make_config(max_num_batched_tokens=128), num_blocks=64, depth=2)
    machine.add(make_request("a", prompt(16)))
    machine.add(make_request("b", prompt(16)))
    step = machine.schedule()
    assert step is not None
    assert [new.num_computed_tokens for new in step.new_reqs] == [0, 0]
    machine.add(make_request("c", prompt(16)))
    step = machine.schedule()
    assert step is not None
    assert step.new_reqs[0].num_computed_tokens == 0
    finish(machine)


def test_reset_prefix_cache_only_when_nothing_runs(depth: int) -> None:
    machine = StepMachine(make_config(), num_blocks=32, depth=depth)
    machine.add(make_request("a", prompt(16)))
    machine.step()
    assert not machine.scheduler.reset_prefix_cache()
    machine.finish()
    assert machine.scheduler.reset_prefix_cache()
    again = machine.add(make_request("b", prompt(16)))
    finish(machine)
    assert again.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_found(depth: int) -> None:
    machine = StepMachine(make_config(enable_prefix_caching=False), 32, depth=depth)
    for name in "ab":
        machine.add(make_request(name, prompt(16)))
        machine.finish()
    assert [c.num_cached_tokens for c in machine.clients.values()] == [0, 0]
    machine.check_all_done()


def test_stats_add_up(depth: int) -> None:
    machine = StepMachine(make_config(max_num_seqs=2), num_blocks=32, depth=depth)
    for name in "abcdefgh":
        machine.add(make_request(name, prompt(9, ord(name)), max_tokens=5))
    before = machine.scheduler.stats()
    assert (before.num_waiting, before.num_waiting_tokens) == (8, 72)
    assert (before.num_free_blocks, before.num_total_blocks) == (32, 32)
    machine.step()
    during = machine.scheduler.stats()
    assert (during.num_running, during.num_waiting, during.num_free_rows) == (2, 6, 0)
    finish(machine)
    after = machine.scheduler.stats()
    assert after.generation_tokens == 40
    assert after.prompt_tokens_computed == 72
    assert (sum(after.step_tokens.counts), after.step_tokens.total) == (after.num_steps, 72 + 40)
    assert after.num_steps == machine.worker.last_step_id + 1
    assert after.prefill_tokens_per_s > 0
    assert after.last_step_at > 0
    assert (after.num_waiting_tokens, after.num_running, after.num_waiting) == (0, 0, 0)
