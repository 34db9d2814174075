"""Beams on a CUDA device: those of many searches at once are those of each alone, no step of theirs
waits for the device, and nothing is compiled while somebody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from tests.engine.worker.gpu_workers import SchedulerAndWorker, small_config, started
from tests.engine.worker.test_gpu_no_waiting import never_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def searches(make_prompt) -> list[EngineCoreRequest]:
    """Makes searches of two widths, and greedy requests beside them."""
    made = []
    for width in (0, 2, 4):
        beam = BeamParams(width) if width else None
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, beam=beam)
        for length in (3, 40, 70):
            spec = RequestSpec(make_prompt(length, width), sampling)
            made.append(EngineCoreRequest(request_id=f"{width}-{length}", spec=spec))
    return made


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_searches_together_are_those_alone(
    small_weights: Path, make_prompt, enforce_eager: bool
) -> None:
    config = small_config(
        small_weights, async_scheduling=True, deterministic=True, enforce_eager=enforce_eager
    )
    with started(config) as worker:
        together = SchedulerAndWorker(config, never_waiting(worker), depth=2)
        together.run(searches(make_prompt))
        assert together.scheduler.check_empty() == []
        assert worker.compile_guard.late == []
    with started(config) as worker:
        alone = SchedulerAndWorker(config, worker.start_step, depth=1)
        for search in searches(make_prompt):
            alone.run([search])
    assert together.tokens == alone.tokens
    assert all(len(tokens) == 20 for tokens in alone.tokens.values())
