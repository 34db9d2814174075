"""The real scheduler over a real worker, short of blocks: preemptions, cached prefixes, aborts, and
results that arrive a step late change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.config import SchedulerConfig
from tests.engine.worker.one_engine import OneEngine, run_traffic


@pytest.mark.parametrize(("seed", "depth"), [(0, 1), (0, 2), (1, 2), (2, 2)])
def test_tokens_are_those_of_requests_alone(
    make_config, ended_alone: Callable[[int], OneEngine], seed: int, depth: int
) -> None:
    config = replace(
        make_config(num_blocks=15),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40),
    )
    run_traffic(OneEngine(config, depth), seed, ended_alone(seed))
