"""Beams enter rows once and keep them, and workers are told no more of them than they need."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import msgspec
import pytest

from engine.contracts.messages import EngineCoreOutput
from engine.contracts.request import Request
from engine.contracts.request_spec import IDLE_PRIORITY
from engine.contracts.scheduler_output import SchedulerOutput
from engine.sched.scheduler import Scheduler
from kv_transfer.connectors.no_connector import NoConnectorScheduler
from tests.engine.sched.choices.beam_workers import NUM_TOKENS, Guesses, asked
from tests.engine.sched.llama_steps import make_config


def run(scheduler: Scheduler, depth: int = 1) -> tuple[list[SchedulerOutput], int]:
    """Runs until nothing is left, with `depth` steps out. Returns the steps, and how many were
    scheduled in vain."""
    workers, steps, out = Guesses(random.Random(0)), [], deque[SchedulerOutput]()
    late = 0
    while scheduler.has_unfinished_requests() or out:
        step = scheduler.schedule() if len(out) < depth else None
        if step is not None:
            steps.append(step)
            out.append(step)
        if step is None or len(out) == depth:
            oldest = out.popleft()
            found = scheduler.update_from_output(oldest, workers.execute(oldest))
            late += len(out) * any(one.finish_reason for one in found.outputs)
    return steps, late


def test_a_beam_brings_its_last_token_alone_and_once() -> None:
    """A step of a search that has its rows tells no more than one of choices."""
    prompt, width = list(range(1, 302)), 3
    scheduler = Scheduler(make_config(width, 16), 400, NoConnectorScheduler())
    scheduler.add_request(Request(asked("beams", 0, width, prompt)))
    steps, _ = run(scheduler)
    brought = [[(new.prefill_len, len(new.prefill_token_ids)) for new in s.new_reqs] for s in steps]
    assert brought[:2] == [[(301, 4 * 301)], [(302, 4)] * width]
    assert not any(brought[2:])
    assert len(steps) == NUM_TOKENS
    largest = max(len(msgspec.msgpack.encode(step)) for step in steps[3:])
    assert largest < 64
    assert scheduler.check_empty() == []


def test_the_next_step_does_not_wait_for_the_choice() -> None:
    """Two steps are out all the time, and only the last is in vain."""
    scheduler = Scheduler(make_config(8, 16), 400, NoConnectorScheduler())
    for index in range(2):
        scheduler.add_request(Request(asked("beams", index, 4, list(range(1, 40 + index)))))
    steps, late = run(scheduler, depth=2)
    assert len(steps) <= NUM_TOKENS + 3
    assert late <= 1
    assert scheduler.check_empty() == []


def test_the_idle_class_sits_no_step_out_that_its_beams_are_in() -> None:
    """One step is had without it now and then, to be measured; beams that keep rows stay in it."""
    config = make_config(8, 16)
    scheduling = replace(config.scheduler, itl_objective_ms=1e3)
    scheduler = Scheduler(replace(config, scheduler=scheduling), 400, NoConnectorScheduler())
    for index, kind in enumerate(("choices", "beams", "choices")):
        request = asked(kind, index, 2, list(range(1, 40 + index)))
        if index:
            request.spec = msgspec.structs.replace(request.spec, priority=IDLE_PRIORITY)
        scheduler.add_request(Request(request))
    steps, _ = run(scheduler)
    assert len(steps) <= NUM_TOKENS + 3


@pytest.mark.parametrize("at", [3, 40])
def test_a_choice_that_is_not_the_schedulers_ends_its_search_alone(at: int) -> None:
    """Blocks would go to the wrong beams: the answers could not be trusted."""
    scheduler = Scheduler(make_config(6, 16), 400, NoConnectorScheduler())
    for index in range(2):
        scheduler.add_request(Request(asked("beams", index, 3, list(range(1, 40)))))
    workers, ended, count = Guesses(random.Random(0)), list[EngineCoreOutput](), 0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        assert step is not None
        result = workers.execute(step)
        count += 1
        if count == at:
            result.token_ids[0] += 1
        outputs = scheduler.update_from_output(step, result).outputs
        ended += [one for one in outputs if one.finish_reason]
    failed = [one for one in ended if one.error]
    assert len(failed) == 3 and len(ended) == 6
    assert all("other beams" in one.error for one in failed)
    assert scheduler.check_empty() == []


@pytest.mark.parametrize("num_blocks", range(12, 24))
def test_blocks_of_beams_that_have_just_branched_may_be_needed_for_rows(num_blocks: int) -> None:
    """A row takes them before the beams could sit down: they compute what they have."""
    config = make_config(8, 4)
    config = replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=1))
    for num_prompt_tokens in range(20, 60, 7):
        scheduler = Scheduler(config, num_blocks, NoConnectorScheduler())
        scheduler.add_request(Request(asked("choices", 0, 1, list(range(1, 9)))))
        workers, count, answers = Guesses(random.Random(0)), 0, list[EngineCoreOutput]()
        while scheduler.has_unfinished_requests():
            if count == 15:
                prompt = list(range(1, num_prompt_tokens))
                scheduler.add_request(Request(asked("beams", 1, 2, prompt)))
            count += 1
            if (step := scheduler.schedule()) is not None:
                outputs = scheduler.update_from_output(step, workers.execute(step)).outputs
                answers += [one for one in outputs if one.finish_reason]
        assert scheduler.check_empty() == []
        assert not any(one.error for one in answers)
