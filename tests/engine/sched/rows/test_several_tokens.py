"""Rows that compute four tokens a step: where outputs end, what is reserved, what is decided."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from engine.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from engine.executor.worker_messages import StepDone
from tests.engine.sched.factories import BLOCK_SIZE, EOS, make_config, make_request
from tests.engine.sched.fake_worker import Drafter
from tests.engine.sched.step_machine import Client, StepMachine

QUERY_LEN = 4
PROMPT = [5, 6, 7]


def right(truth: list[int]) -> list[int]:
    return truth


def wrong(truth: list[int]) -> list[int]:
    return [token + 1 for token in truth]


def machine_with(
    drafter: Drafter, *, depth: int = 2, num_blocks: int = 64, block_size: int = BLOCK_SIZE
) -> StepMachine:
    config = make_config(decode_query_len=QUERY_LEN, block_size=block_size)
    machine = StepMachine(config, num_blocks=num_blocks, depth=depth)
    machine.worker.drafter = drafter
    return machine


def answer(**sampling: object) -> list[int]:
    """Returns what the model says after `PROMPT`."""
    machine = machine_with(right)
    return machine.add(make_request("a", PROMPT, **sampling)).expected


def run(machine: StepMachine, **sampling: object) -> Client:
    client = machine.add(make_request("a", PROMPT, **sampling))
    machine.finish()
    machine.check_all_done()
    return client


def test_right_drafts_give_four_tokens_a_step() -> None:
    machine = machine_with(right, depth=1)
    client = run(machine, max_tokens=21)
    assert client.finish_reason == "length"
    # The prompt's step gives one token, each other one four.
    assert machine.scheduler.stats().num_steps == 1 + 20 // QUERY_LEN
    assert machine.scheduler.stats().generation_tokens == 21


@pytest.mark.parametrize("drafter", [right, wrong])
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_no_token_behind_the_last(drafter: Drafter, max_tokens: int) -> None:
    machine = machine_with(drafter)
    client = run(machine, max_tokens=max_tokens)
    assert len(client.tokens) == max_tokens
    assert machine.scheduler.stats().generation_tokens == max_tokens


@pytest.mark.parametrize("place", range(1, 9))
def test_tokens_behind_a_stop_token_are_dropped(place: int) -> None:
    whole = answer(max_tokens=20)
    ending = whole[place]
    machine = machine_with(right)
    client = run(machine, max_tokens=20, stop_token_ids=(ending,))
    assert client.tokens == whole[: whole.index(ending) + 1]
    assert client.finish_reason == "stop"
    assert machine.scheduler.stats().generation_tokens == len(client.tokens)


def test_a_stop_token_among_new_ones_counts_from_min_tokens_on() -> None:
    """The end is ignored before, whatever the worker says."""
    machine = machine_with(right)
    client = machine.add(make_request("a", PROMPT, max_tokens=12, min_tokens=6, ignore_eos=False))
    step = machine.step()
    assert step is not None
    machine.settle()
    row = machine.scheduler._running.table.rows[step.new_reqs[0].row]
    assert row is not None
    step = machine.scheduler.schedule()
    assert step is not None
    # Output 2 to 5: an end at 3 is too early.
    tokens = [9, EOS, 9, 9]
    found = ModelRunnerOutput(step.step_id, [row.index], [row.epoch], tokens, counts=[4])
    outputs = machine.scheduler.update_from_output(step, found).outputs
    assert [(out.new_token_ids, out.finish_reason) for out in outputs] == [(tokens, "")]
    step = machine.scheduler.schedule()
    assert step is not None
    # Output 6 to 9.
    found = ModelRunnerOutput(step.step_id, [row.index], [row.epoch], tokens, counts=[4])
    outputs = machine.scheduler.update_from_output(step, found).outputs
    assert [(out.new_token_ids, out.finish_reason) for out in outputs] == [([9, EOS], "stop")]
    assert client.request.num_output_tokens == 7
    assert machine.scheduler.check_empty() == []


def test_logprobs_are_cut_with_their_tokens() -> None:
    machine = machine_with(right, depth=1)
    whole = answer(max_tokens=20)
    machine.add(make_request("z", [9], max_tokens=20))
    machine.add(make_request("a", PROMPT, max_tokens=20, logprobs=0, stop_token_ids=(whole[2],)))
    machine.step()
    machine.settle()
    machine.schedule()
    machine.run()
    step, output = machine.ran.popleft()
    assert output.counts == [4, 4]
    for place in range(4, 8):
        output.logprobs[place] = TokenLogprobs([output.token_ids[place]], [-0.5 - place], 1)
    results = machine.scheduler.update_from_output(step, output)
    by_id = {out.request_id: out for out in results.outputs}
    assert by_id["z"].logprobs is None
    ended = by_id["a"]
    assert ended.finish_reason == "stop"
    assert ended.new_token_ids == whole[1:3]
    assert ended.logprobs == [output.logprobs[4], output.logprobs[5]]


def test_blocks_are_reserved_for_what_steps_in_flight_may_give() -> None:
    """Nothing is reserved beyond, however few tokens they gave."""
    machine = machine_with(wrong)
    machine.add(make_request("a", PROMPT, max_tokens=100))
    most = 0
    for _ in range(60):
        machine.step()
        row = next(machine.scheduler._running.table.live())
        capacity = machine.scheduler._kv_cache.capacity(row.blocks)
        in_flight = machine.num_out * QUERY_LEN
        most = max(most, capacity - len(row.tokens) - in_flight)
    assert most < BLOCK_SIZE


def test_decisions_are_few_though_results_move_the_bounds(monkeypatch) -> None:
    """A row is looked at when it might need a block, not in every step."""
    machine = machine_with(wrong, block_size=32)
    running = machine.scheduler._running
    decisions: Counter[int] = Counter()
    decide = running._decide

    def counted(row, step_id):  # type: ignore[no-untyped-def]
        decisions[row.index] += 1
        decide(row, step_id)

    monkeypatch.setattr(running, "_decide", counted)
    run(machine, max_tokens=100)
    num_steps = machine.scheduler.stats().num_steps
    assert num_steps > 95
    assert sum(decisions.values()) < num_steps / 2


def test_rows_leave_the_decode_set_when_their_end_is_certain() -> None:
    """Each step that is out gives one token at least: with two of them missing and two steps out
    there is nothing left to compute."""
    machine = machine_with(wrong)
    machine.add(make_request("a", PROMPT, max_tokens=6))
    steps = []
    while machine.scheduler.has_unfinished_requests():
        step = machine.step()
        if step is not None:
            steps.append(step)
    assert len(steps) == 6
    machine.check_all_done()


def test_more_rows_than_a_step_has_tokens_for() -> None:
    config = make_config(decode_query_len=QUERY_LEN, max_num_batched_tokens=10, max_num_seqs=8)
    machine = StepMachine(config, num_blocks=64, depth=2)
    for i in range(6):
        machine.add(make_request(f"r{i}", [i + 1], max_tokens=9))
    machine.step()
    machine.step()
    assert machine.scheduler.stats().num_running == 2
    machine.finish()
    machine.check_all_done()


def test_only_confirmed_tokens_are_published() -> None:
    machine = machine_with(right, depth=1)
    machine.add(make_request("a", PROMPT, max_tokens=40))
    machine.step()
    machine.settle()
    for _ in range(4):
        machine.step()
        machine.settle()
        cached = machine.scheduler._kv_cache.block_pool
        confirmed = len(next(machine.scheduler._running.table.live()).tokens)
        published = sum(block.block_hash is not None for block in cached.blocks)
        assert published == (confirmed - 1) // BLOCK_SIZE


def test_messages_of_steady_steps_do_not_grow() -> None:
    """A step of 256 rows without a decision says its number; a result of one token each says whose
    they are, and nothing of counts."""
    machine = machine_with(wrong, depth=1)
    run(machine, max_tokens=60)
    one = StepMachine(make_config(), num_blocks=64)
    run(one, max_tokens=60)
    assert min(machine.worker.message_bytes) == min(one.worker.message_bytes) == 10

    rows, epochs, tokens = list(range(256)), [1] * 256, [100_000] * 256
    done = StepDone(ModelRunnerOutput(1, rows, epochs, tokens), 1.0)
    # One byte of it says which data-parallel group has computed, one that experts stay, one that
    # the worker is its own device, for which no step lies ready, and one that nothing was compiled.
    assert len(msgspec.msgpack.encode(done)) == 1956
