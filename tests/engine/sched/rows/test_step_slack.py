"""Prompts leave the answers beside them the time that an objective gives."""

from __future__ import annotations

import random

import pytest

from engine.contracts.scheduler_output import SchedulerOutput
from engine.sched.rows.step_slack import StepSlack
from tests.engine.sched.factories import make_config, make_request
from tests.engine.sched.step_machine import StepMachine


def measured(objective_s: float, decode_s: float, each_s: float) -> StepSlack:
    slack = StepSlack(objective_s)
    slack.observe(decode_s, 4, 0)
    slack.observe(decode_s + 256 * each_s, 4, 256)
    return slack


def test_without_an_objective_nothing_is_bounded() -> None:
    slack = measured(0.0, 0.010, 1e-5)
    assert slack.limit(8192, 100) == 8192
    assert slack.tokens_per_s(0.0) == 0.0


def test_where_nobody_decodes_steps_are_filled() -> None:
    assert measured(0.020, 0.010, 1e-5).limit(8192, 0) == 8192


def test_the_room_is_what_steps_have_left() -> None:
    """Steps aim at 18 of 20 ms, and 10 of them decode: 8 ms, at 10 us a token, in tiles of 64."""
    slack = measured(0.020, 0.010, 1e-5)
    assert slack.limit(8192, 4) == 768
    assert slack.limit(500, 4) == 500, "never more than the budget"
    assert slack.tokens_per_s(0.0) == pytest.approx(768 / 0.020)


def test_before_anything_was_measured_a_step_takes_little() -> None:
    slack = StepSlack(0.020)
    assert slack.limit(8192, 4) == 256
    slack.observe(0.030, 4, 0)
    assert slack.limit(8192, 4) == 64, "decoding alone takes longer, and prompts go on"
    assert slack.tokens_per_s(0.0) == 0.0, "but nobody should send more of them"


def test_a_step_that_was_too_long_counts_at_once_and_a_short_one_slowly() -> None:
    slack = measured(0.020, 0.010, 1e-5)
    slack.observe(0.010 + 256 * 4e-5, 4, 256)
    assert slack.limit(8192, 4) == 192
    for _ in range(40):
        slack.observe(0.010 + 256 * 1e-5, 4, 256)
    assert slack.limit(8192, 4) == 768


def test_a_small_part_of_a_prompt_says_little_of_a_large_one() -> None:
    """A part of 64 tokens takes 6 ms, one of 512 takes 7.7: steps must not stay at 64."""
    slack = measured(0.020, 0.010, 3e-5)
    slack.observe(0.016, 4, 64)
    assert slack.limit(8192, 4) == 256
    slack.observe(0.010 + 512 * 1.5e-5, 4, 512)
    assert slack.limit(8192, 4) == 512
    slack.observe(0.018, 4, 64)
    assert slack.limit(8192, 4) == 512


def test_one_step_that_was_held_up_is_forgotten() -> None:
    slack = measured(0.020, 0.010, 1e-5)
    slack.observe(0.060, 4, 64)
    slack.observe(0.060, 4, 256)
    assert slack.tokens_per_s(0.0) == 0.0
    for _ in range(3000):
        slack.observe(0.010, 4, 0)
    assert slack.tokens_per_s(0.0) > 0


def test_room_counts_only_while_longer_answers_would_fit() -> None:
    """Answers that take 1.5 times as long are 1.5 times as many: two thirds may be in use."""
    slack = measured(0.020, 0.010, 1e-5)
    assert slack.tokens_per_s(0.66) > 0
    assert slack.tokens_per_s(0.67) == 0.0


def prompt_tokens(step: SchedulerOutput | None) -> int:
    return sum(count for _, count in step.prefill_chunks) if step is not None else 0


def test_a_prompt_beside_an_answer_is_cut_and_ends_all_the_same() -> None:
    config = make_config(max_num_batched_tokens=512, max_model_len=1024, itl_objective_ms=1e-6)
    machine = StepMachine(config, num_blocks=400)
    rng = random.Random(0)
    machine.add(make_request("running", [1, 2, 3], max_tokens=60))
    for _ in range(3):
        machine.step()
    machine.add(make_request("long", [rng.randrange(1, 60) for _ in range(700)], max_tokens=3))
    counts = [prompt_tokens(machine.step()) for _ in range(10)]
    assert max(counts) <= 256
    assert 64 in counts, "no step has room, and the prompt goes on"
    machine.finish()
    machine.check_all_done()


def test_a_prompt_alone_fills_its_steps_whatever_the_objective() -> None:
    config = make_config(max_num_batched_tokens=512, max_model_len=1024, itl_objective_ms=1e-6)
    machine = StepMachine(config, num_blocks=400)
    machine.add(make_request("long", [7] * 700, max_tokens=2))
    assert prompt_tokens(machine.step()) == 512
    machine.finish()
    machine.check_all_done()
