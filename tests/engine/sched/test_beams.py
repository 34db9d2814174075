"""Beams enter rows at every step: workers are told no more of them than they need, and all searches
compute in the same steps."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from bench.engine.beams import Guesses, asked
from bench.engine.scheduler import make_config
from engine.messages import EngineCoreRequest
from engine.outputs import ModelRunnerOutput
from engine.request import Request
from engine.request_spec import RequestSpec
from engine.sampling_params import SamplingParams
from engine.sched.output import SchedulerOutput
from engine.sched.scheduler import Scheduler
from kv_transfer.no_connector import NoConnectorScheduler

NUM_TOKENS = 128


def test_a_beam_brings_its_last_token_alone() -> None:
    """The prompt goes to workers once, however long the search is."""
    prompt, width = list(range(1, 302)), 3
    scheduler = Scheduler(make_config(width, 16), 400, NoConnectorScheduler())
    scheduler.add_request(Request(asked("beams", 0, width, prompt)))
    workers, brought = Guesses(random.Random(0)), []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        assert step is not None
        brought.append([(new.prefill_len, len(new.prefill_token_ids)) for new in step.new_reqs])
        scheduler.update_from_output(step, workers.execute(step))
    assert brought[0] == [(301, 4 * 301)]
    assert brought[1:] == [[(301 + i, 4)] * width for i in range(1, len(brought))]
    assert len(brought) == NUM_TOKENS
    assert scheduler.check_empty() == []


class Searches:
    """Runs searches of width 4 in an engine of `num_rows`, of whose steps two may be in flight.
    `sizes`: the rows of each step."""

    def __init__(self, num_rows: int, num_stages: int = 1) -> None:
        config = make_config(num_rows, 16)
        parallel = replace(config.parallel, pipeline_parallel_size=num_stages)
        config = replace(config, parallel=parallel)
        self.scheduler = Scheduler(config, 4000, NoConnectorScheduler())
        self._workers = Guesses(random.Random(0))
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._num_added = 0
        self.sizes: list[int] = []

    def add(self, num_prompt_tokens: int) -> None:
        prompt = list(range(1, 1 + num_prompt_tokens))
        self.scheduler.add_request(Request(asked("beams", self._num_added, 4, prompt)))
        self._num_added += 1

    def add_decode(self, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        spec = RequestSpec([1, 2, 3], sampling)
        self.scheduler.add_request(Request(EngineCoreRequest(request_id="decode", spec=spec)))

    def turn(self) -> bool:
        """Fills the queue of steps, and takes the oldest result. Returns whether there was any."""
        while len(self._in_flight) < 2:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._in_flight.append((step, self._workers.execute(step)))
        if not self._in_flight:
            return False
        step, result = self._in_flight.popleft()
        self.sizes.append(len(result.rows))
        self.scheduler.update_from_output(step, result)
        return True

    def finish(self) -> list[int]:
        while self.turn():
            pass
        assert self.scheduler.check_empty() == []
        return self.sizes


def test_searches_compute_in_the_same_steps() -> None:
    """Their prompts end in different steps, and some come later than others."""
    searches = Searches(num_rows=32)
    for _ in range(6):
        searches.add(2000)
    for _ in range(5):
        searches.turn()
    searches.add(2000)
    searches.turn()
    searches.add(100)
    sizes = searches.finish()
    assert len(sizes) <= NUM_TOKENS + 12
    assert sizes.count(32) >= NUM_TOKENS - 12


@pytest.mark.parametrize("num_stages", [1, 2])
def test_who_takes_turns_in_vain_does_so_no_longer(num_stages: int) -> None:
    """A request that decodes lets two searches compute in turns, and ends. They go on together,
    but where a stage would wait meanwhile."""
    searches = Searches(num_rows=9, num_stages=num_stages)
    searches.add_decode(40)
    searches.add(20)
    searches.turn()
    searches.turn()
    searches.add(20)
    for _ in range(30):
        searches.turn()
    assert searches.sizes[-10:] == [5] * 10
    searches.finish()
    assert set(searches.sizes[-40:-10]) == ({8} if num_stages == 1 else {4})


def test_nobody_waits_where_a_step_cannot_hold_all() -> None:
    """All rows are in use in every step but the first, until a search ends."""
    searches = Searches(num_rows=10)
    for _ in range(3):
        searches.add(20)
    sizes = searches.finish()
    assert set(sizes[1:NUM_TOKENS]) == {10}
