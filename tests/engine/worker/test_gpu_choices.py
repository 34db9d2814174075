"""Choices of one prompt on a CUDA device give the tokens of requests alone in deterministic mode,
with graphs and without, and nothing is compiled while somebody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.worker.gpu_workers import small_config
from tests.engine.worker.one_engine import OneEngine, check_empty
from tests.engine.worker.test_choices import add, alone, check_equal, workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_choices_are_requests_with_their_seeds(small_weights: Path, enforce_eager: bool) -> None:
    config = small_config(
        small_weights, dtype="bfloat16", deterministic=True, enforce_eager=enforce_eager
    )
    messages = workload(5)
    expected = OneEngine(config, depth=1)
    for message in messages:
        for index in range(5):
            expected.add(alone(message, index))
            expected.finish()
    check_empty(expected)

    engine = OneEngine(config, depth=2)
    engine.worker.capture_model(lambda stage, fraction: None)
    for message in messages:
        add(engine, message)
    engine.finish()
    del expected.tokens["last"], expected.logprobs["last"]
    check_equal(engine, expected)
    num_prompt_tokens = sum(len(message.spec.prompt_token_ids) for message in messages)
    assert engine.scheduler.stats().prompt_tokens_computed == num_prompt_tokens
    assert engine.worker.compile_guard.late == []
    check_empty(engine)
