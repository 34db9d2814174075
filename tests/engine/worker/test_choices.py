"""The real scheduler over a real worker: n choices of one prompt are n requests with their seeds,
token for token, and the prompt is computed once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from tests.engine.worker.conftest import tiny_config
from tests.engine.worker.one_engine import EOS, KINDS, OneEngine, check_empty

HOT = {"temperature": 1.5, "logprobs": 2}


def forked(name: str, prompt: list[int], num_choices: int, **sampling: Any) -> EngineCoreRequest:
    seed = len(prompt) * 1000
    seeds = tuple(range(seed + 1, seed + num_choices))
    spec = RequestSpec(prompt, SamplingParams(seed=seed, **sampling), sibling_seeds=seeds)
    ids = tuple(f"{name}.{i}" for i in range(num_choices))
    return EngineCoreRequest(request_id=name, spec=spec, eos_token_ids=(EOS,), choice_ids=ids)


def alone(message: EngineCoreRequest, index: int) -> EngineCoreRequest:
    return msgspec.structs.replace(
        message,
        request_id=message.choice_ids[index],
        spec=message.spec.of_choice(index),
        choice_ids=(),
    )


def add(engine: OneEngine, message: EngineCoreRequest) -> None:
    for name in message.choice_ids:
        engine.tokens[name], engine.logprobs[name] = [], []
    engine.add(message)


def workload(num_choices: int) -> list[EngineCoreRequest]:
    """Prompts shorter and longer than a step, ending in the middle and at the end of blocks, some
    of which begin alike; every kind of sampling."""
    rng = random.Random(num_choices)
    shared = [rng.randrange(211) for _ in range(16)]
    kinds = [*KINDS, HOT]
    return [
        forked(
            f"{i}",
            (shared if i % 2 else []) + [rng.randrange(211) for _ in range(length)],
            num_choices,
            max_tokens=24,
            **kinds[i],  # type: ignore[arg-type]
        )
        for i, length in enumerate([1, 8, 32, 13, 9, 50])
    ]


def check_equal(engine: OneEngine, expected: OneEngine) -> None:
    for name, tokens in expected.tokens.items():
        assert engine.tokens[name] == tokens, name
        assert engine.ended[name] == expected.ended[name]
        for found, other in zip(engine.logprobs[name], expected.logprobs[name], strict=True):
            assert (found.token_ids, found.rank) == (other.token_ids, other.rank)
            assert found.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def chosen_alone(checkpoint: Path) -> Callable[[int], OneEngine]:
    """Returns an engine that had one choice of `workload(num_choices)` after another."""

    @cache
    def run(num_choices: int) -> OneEngine:
        engine = OneEngine(tiny_config(checkpoint, enable_prefix_caching=False), depth=1)
        for message in workload(num_choices):
            for index in range(num_choices):
                engine.add(alone(message, index))
                engine.finish()
        check_empty(engine)
        del engine.tokens["last"], engine.logprobs["last"]
        return engine

    return run


@pytest.mark.parametrize("num_choices", [4, 8])
@pytest.mark.parametrize(
    ("caching", "num_blocks", "rows", "decode_query_len"),
    [(False, 64, 6, 1), (True, 64, 3, 1), (False, 16, 6, 1), (True, 16, 6, 1), (False, 64, 6, 3)],
    ids=["plain", "few rows", "few blocks", "few blocks, cached", "drafts"],
)
def test_choices_are_requests_with_their_seeds(
    make_config: Any,
    chosen_alone: Callable[[int], OneEngine],
    num_choices: int,
    caching: bool,
    num_blocks: int,
    rows: int,
    decode_query_len: int,
) -> None:
    config = replace(
        make_config(num_blocks=num_blocks, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=20),
        decode_query_len=decode_query_len,
    )
    messages = workload(num_choices)
    engine = OneEngine(config, depth=2)
    for message in messages:
        add(engine, message)
    engine.finish()
    check_equal(engine, chosen_alone(num_choices))
    stats = engine.scheduler.stats()
    num_prompt_tokens = sum(len(message.spec.prompt_token_ids) for message in messages)
    if num_blocks == 64:
        computed = stats.prompt_tokens_computed + stats.prefix_cache_hits
        assert (stats.num_preemptions, computed) == (0, num_prompt_tokens)
    else:
        assert stats.num_preemptions > 0
    hot = len(KINDS)
    distinct = {tuple(engine.tokens[f"{hot}.{i}"]) for i in range(num_choices)}
    assert len(distinct) == num_choices
    check_empty(engine)
