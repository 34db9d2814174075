"""Several tokens a row and step on a GPU: nothing depends on drafts, and nothing waits for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.messages import EngineCoreRequest
from engine.worker.drafter import Drafter
from tests.engine.worker.drafters import KnowingDrafter, RepeatingDrafter
from tests.engine.worker.gpu_workers import (
    SchedulerAndWorker,
    mixed_requests,
    small_config,
    started,
)
from tests.engine.worker.test_gpu_no_waiting import never_waiting
from tests.engine.worker.test_speculation import with_ngrams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def run(
    config: EngineConfig, requests: list[EngineCoreRequest], drafter: Drafter | None
) -> tuple[SchedulerAndWorker, int]:
    """Returns the engine, and how many steps it took. `drafter` None: that of `config`."""
    with started(config) as worker:
        if drafter is not None:
            worker.runner.drafts.drafter = drafter
        engine = SchedulerAndWorker(config, worker.start_step, depth=2)
        engine.run(requests)
        assert engine.scheduler.check_empty() == []
        return engine, engine.scheduler.stats().num_steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_deterministic_mode_not_even_a_bit_depends_on_drafts(
    small_weights: Path, make_prompt, dtype: str
) -> None:
    config = small_config(small_weights, dtype=dtype, deterministic=True)
    requests = mixed_requests(make_prompt)
    one, num_steps = run(config, requests, None)
    answers = [
        [*request.spec.prompt_token_ids, *one.tokens[request.request_id]] for request in requests
    ]
    for lies, at_most in ((0.0, 0.5), (0.4, 0.9)):
        drafter = KnowingDrafter(answers, lies=lies)
        several, fewer_steps = run(replace(config, decode_query_len=4), requests, drafter)
        assert several.tokens == one.tokens
        assert several.logprobs == one.logprobs
        assert fewer_steps <= at_most * num_steps


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("query_len", [2, 4, 8])
def test_in_deterministic_mode_not_even_a_bit_depends_on_ngrams(
    small_weights: Path, make_prompt, query_len: int, is_recorded: bool
) -> None:
    config = small_config(small_weights, dtype="bfloat16", deterministic=True)
    requests = mixed_requests(make_prompt)
    one, _ = run(config, requests, None)
    config = replace(
        with_ngrams(config, query_len),
        device=replace(config.device, enforce_eager=not is_recorded),
    )
    several, _ = run(config, requests, None)
    assert several.tokens == one.tokens
    assert several.logprobs == one.logprobs
    assert several.scheduler.stats().drafts.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["none", "repeating", "ngram"])
def test_no_step_with_drafts_waits(small_weights: Path, make_prompt, kind: str) -> None:
    config = small_config(small_weights, num_blocks=22, async_scheduling=True)
    config = with_ngrams(config, 4)
    with started(config) as worker:
        if kind != "ngram":
            worker.runner.drafts.drafter = RepeatingDrafter() if kind == "repeating" else None
        engine = SchedulerAndWorker(config, never_waiting(worker), depth=2)
        engine.run(mixed_requests(make_prompt))
        assert engine.scheduler.check_empty() == []
