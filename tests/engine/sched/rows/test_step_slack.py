"""Prompts leave the answers beside them the time that an objective gives."""

from __future__ import annotations

import random

import pytest

from engine.contracts.request_spec import IDLE_PRIORITY
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_launches import GraphKey, LaunchTime, StepLaunches, StepParts
from engine.models.recorded_steps import prompt_keys
from engine.sched.rows.step_slack import StepSlack
from tests.engine.sched.factories import make_config, make_order, make_request
from tests.engine.sched.step_machine import StepMachine


def measured(objective_s: float, decode_s: float, each_s: float) -> StepSlack:
    slack = StepSlack(objective_s)
    slack.observe(decode_s, 4, 0)
    slack.observe(decode_s + 256 * each_s, 4, 256)
    return slack


def test_without_an_objective_nothing_is_bounded() -> None:
    slack = measured(0.0, 0.010, 1e-5)
    assert slack.limit(8192, StepParts(100)) == 8192
    assert slack.tokens_per_s(0.0) == 0.0


def test_where_nobody_decodes_steps_are_filled() -> None:
    assert measured(0.020, 0.010, 1e-5).limit(8192, StepParts(0)) == 8192


def test_the_room_is_what_steps_have_left() -> None:
    """Steps aim at 18 of 20 ms, and 10 of them decode: 8 ms, at 10 us a token, in tiles of 64."""
    slack = measured(0.020, 0.010, 1e-5)
    assert slack.limit(8192, StepParts(4)) == 768
    assert slack.limit(500, StepParts(4)) == 500, "never more than the budget"
    assert slack.tokens_per_s(0.0) == pytest.approx(768 / 0.020)


def test_before_anything_was_measured_a_step_takes_little() -> None:
    slack = StepSlack(0.020)
    assert slack.limit(8192, StepParts(4)) == 256
    slack.observe(0.030, 4, 0)
    assert slack.limit(8192, StepParts(4)) == 64, "decoding alone takes longer, and prompts go on"
    assert slack.tokens_per_s(0.0) == 0.0, "but nobody should send more of them"


def test_a_step_that_was_too_long_counts_at_once_and_a_short_one_slowly() -> None:
    slack = measured(0.020, 0.010, 1e-5)
    slack.observe(0.010 + 256 * 4e-5, 4, 256)
    assert slack.limit(8192, StepParts(4)) == 192
    for _ in range(40):
        slack.observe(0.010 + 256 * 1e-5, 4, 256)
    assert slack.limit(8192, StepParts(4)) == 768


def test_a_small_part_of_a_prompt_says_little_of_a_large_one() -> None:
    """A part of 64 tokens takes 6 ms, one of 512 takes 7.7: steps must not stay at 64."""
    slack = measured(0.020, 0.010, 3e-5)
    slack.observe(0.016, 4, 64)
    assert slack.limit(8192, StepParts(4)) == 256
    slack.observe(0.010 + 512 * 1.5e-5, 4, 512)
    assert slack.limit(8192, StepParts(4)) == 512
    slack.observe(0.018, 4, 64)
    assert slack.limit(8192, StepParts(4)) == 512


@pytest.mark.parametrize(
    ("launches_s", "each_s", "sizes"),
    [
        (0.044, 80e-6, [256, 64, 128, 512, 1024, 512, 512]),
        (0.006, 50e-6, [256, 64, 128, 64, 64]),
    ],
)
def test_steps_that_are_too_long_anyway_are_few(
    launches_s: float, each_s: float, sizes: list[int]
) -> None:
    """Launches one by one take 44 ms, in which the GPU computes 512 tokens as well as 64. Where
    each token costs, steps stay short."""
    slack = StepSlack(0.015)
    slack.observe(0.008, 12, 0)
    found = []
    for _ in sizes:
        found.append(slack.limit(8192, StepParts(12)))
        slack.observe(0.008 + max(launches_s, found[-1] * each_s + 0.006), 12, found[-1])
    assert found == sizes


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


def test_others_have_the_room_of_steps_without_the_idle_class() -> None:
    """Beside the idle class decoding takes 14 ms, without it 10: 8 of 18 ms are others' room."""
    slack = measured(0.020, 0.010, 1e-5)
    slack.observe(0.014, 8, 0, 4)
    assert slack.limit(8192, StepParts(8), 4) == 384
    assert slack.limit(8192, StepParts(4), 0) == 768
    assert slack.tokens_per_s(0.0) == pytest.approx(768 / 0.020)
    slack.observe(0.014 + 384 * 1e-5, 8, 384, 4)
    assert slack.limit(8192, StepParts(4), 0) == 768, (
        "what a token costs does not depend on who decodes"
    )


def test_a_step_is_wanted_that_shows_what_others_take() -> None:
    slack = measured(0.020, 0.010, 1e-5)
    for _ in range(63):
        slack.observe(0.014, 8, 0, 4)
    assert not slack.is_blind
    slack.observe(0.014, 8, 256, 4)
    assert slack.is_blind
    slack.observe(0.016, 4, 256, 0)
    assert slack.is_blind, "beside a prompt nothing is shown"
    slack.observe(0.010, 4, 0, 0)
    assert not slack.is_blind
    for _ in range(100):
        slack.observe(0.014, 4, 0, 4)
    assert not slack.is_blind, "nobody else decodes"


def test_one_of_many_steps_is_for_all() -> None:
    slack = measured(0.020, 0.010, 1e-5)
    held = [slack.holds_idle(True, 8, 4) for _ in range(130)]
    assert [number for number, is_held in enumerate(held) if not is_held] == [63, 127]
    assert not slack.holds_idle(False, 8, 4)
    assert not measured(0.0, 0.010, 1e-5).holds_idle(True, 8, 4), "there is no objective"


def test_the_idle_class_sits_out_while_a_prompt_of_others_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepSlack, "limit", lambda self, budget, *step: min(budget, 64))
    config = make_config(max_num_batched_tokens=512, max_model_len=1024, itl_objective_ms=1e-6)
    machine = StepMachine(config, num_blocks=400)
    others = machine.add(make_request("others", [1, 2, 3], max_tokens=60))
    batch = machine.add(make_request("batch", [4, 5], max_tokens=60, priority=IDLE_PRIORITY))
    while len(batch.tokens) < 3:
        machine.step()
    late = machine.add(make_request("prompt", [9] * 400, max_tokens=3))
    machine.step()
    before = len(batch.tokens), len(others.tokens)
    while not late.tokens:
        machine.step()
    assert len(batch.tokens) <= before[0] + 2, "but for steps that were out when it came and ended"
    assert len(others.tokens) > before[1] + 3
    machine.finish()
    machine.check_all_done()


def test_prompts_of_the_idle_class_wait_for_others() -> None:
    config = make_config(max_num_batched_tokens=512, max_model_len=1024, itl_objective_ms=1e-6)
    machine = StepMachine(config, num_blocks=400, order=make_order(64, 512))
    machine.add(make_request("others", [1, 2, 3], max_tokens=60))
    for _ in range(3):
        machine.step()
    batch = machine.add(make_request("batch", [8] * 700, max_tokens=2, priority=IDLE_PRIORITY))
    machine.step()
    late = machine.add(make_request("prompt", [9] * 400, max_tokens=3))
    while not late.tokens:
        machine.step()
        assert not batch.tokens
    machine.finish()
    machine.check_all_done()


def test_where_others_take_all_blocks_the_idle_class_goes_on_behind_them() -> None:
    """A prompt of others that has no room holds nobody: what sits out would free its blocks."""
    config = make_config(max_num_batched_tokens=64, max_model_len=128, itl_objective_ms=1e-6)
    machine = StepMachine(config, num_blocks=32)
    machine.add(make_request("batch", [4] * 60, max_tokens=40, priority=IDLE_PRIORITY))
    for _ in range(5):
        machine.step()
    machine.add(make_request("prompt", [9] * 60, max_tokens=3))
    machine.finish()
    machine.check_all_done()


RECORDED = StepLaunches(
    decodes={1: (1, 2, 4, 8, 12)},
    prompts=tuple(
        GraphKey(num_reqs, num_tokens, samples)
        for num_reqs, num_tokens in ((4, 8), (6, 16), (10, 32))
        for samples in (True, False)
    ),
)


def test_prompts_of_a_step_that_is_cut_fill_their_graph() -> None:
    """There is room for 448 tokens, and the graph of 512 computes them in its time."""
    launches = StepLaunches({4: (8,)}, tuple(prompt_keys(64, 1024)), one_by_one=LaunchTime(4000))
    limits = []
    for known in (None, launches):
        slack = StepSlack(0.020, known)
        slack.observe(0.010, 4, 0)
        slack.observe(0.010 + 256 * 1.75e-5, 4, 256)
        limits.append(slack.limit(8192, StepParts(4, query_len=4)))
    assert limits == [448, 512]


def test_a_step_is_what_its_graph_has_room_for() -> None:
    """All of 768 tokens beside 4 answers have room in the objective. A graph of 512 is the largest,
    and one of 192 computes 128 tokens beside 4 in the time of 188."""
    keys = [GraphKey(64, size, samples) for size in (128, 192, 512) for samples in (True, False)]
    slack = StepSlack(0.020, StepLaunches(prompts=tuple(keys)))
    slack.observe(0.010, 4, 0)
    slack.observe(0.010 + 256 * 1e-5, 4, 256)
    assert slack.limit(8192, StepParts(4)) == 508
    assert slack.limit(8192, StepParts(64)) == 768, "beside that many no step is a graph"
    assert slack.most_prompts(StepParts(4)) == 60 < slack.most_prompts(StepParts(64))
    slack.observe(0.010 + 256 * 5e-5, 4, 256)
    assert slack.limit(8192, StepParts(4)) == 188


@pytest.mark.parametrize("seed", range(3))
def test_steps_beside_answers_are_graphs_wherever_one_has_room(seed: int) -> None:
    config = make_config(
        max_num_seqs=12, max_num_batched_tokens=64, max_model_len=256, itl_objective_ms=1e-6
    )
    order = make_order(32, 64) if seed else None
    machine = StepMachine(config, num_blocks=400, seed=seed, order=order, launches=RECORDED)
    scheduler, rng = machine.scheduler, random.Random(seed)
    planned: list[StepParts] = []
    schedule = scheduler.schedule

    def noting() -> SchedulerOutput | None:
        step = schedule()
        if step is not None:
            # Without drafts a prompt's last token alone decodes.
            counts = [count for _, count in step.prefill_chunks]
            prompts = [count for count in counts if count > 1]
            decodes = scheduler.running.calendar.size + len(counts) - len(prompts)
            planned.append(StepParts(decodes, len(prompts), sum(prompts), samples=False))
        return step

    scheduler.schedule = noting  # type: ignore[method-assign]
    for index in range(40):
        prompt = [rng.randrange(1, 60) for _ in range(rng.choice((2, 5, 30, 120)))]
        machine.add(make_request(str(index), prompt, max_tokens=rng.randrange(5, 60)))
        machine.step()
    machine.finish()
    machine.check_all_done()
    mixed = [parts for parts in planned if parts.num_decodes and parts.num_prompts]
    fit = [parts for parts in mixed if parts.num_decodes < RECORDED.most_requests]
    assert len(fit) > 10
    assert [found for one in fit if isinstance(found := RECORDED.find(one), str)] == []
