"""Beams enter rows at every step, and workers are told no more of them than they need."""

from __future__ import annotations

import random

from bench.engine.beams import Guesses, asked
from bench.engine.scheduler import make_config
from engine.request import Request
from engine.sched.scheduler import Scheduler
from kv_transfer.no_connector import NoConnectorScheduler


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
    assert len(brought) == 128
    assert scheduler.check_empty() == []
