"""Several tokens a row and step on the real CPU engine: whatever is drafted, each request gets the
tokens, log probabilities and end that it gets with one token a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.config import DeviceConfig, EngineConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.worker.drafts.drafter import Drafter
from tests.engine.worker.drafts.drafters import KnowingDrafter, RandomDrafter
from tests.engine.worker.one_engine import OneEngine, check_empty, run_traffic, workload


def answers(alone: OneEngine, seed: int) -> list[list[int]]:
    """Prompts of a workload, each with its output."""
    return [
        [*request.spec.prompt_token_ids, *alone.tokens[request.request_id]]
        for request in workload(seed)
    ]


def make_drafter(kind: str, known: list[list[int]]) -> Drafter | None:
    match kind:
        case "knowing":
            return KnowingDrafter(known)
        case "lying":
            return KnowingDrafter(known, lies=0.3, gaps=0.3, seed=1)
        case "random":
            return RandomDrafter(211)
    return None


@pytest.mark.parametrize(
    ("kind", "query_len", "depth", "seed"),
    [
        ("knowing", 4, 2, 0),
        ("lying", 4, 2, 0),
        ("lying", 4, 1, 1),
        ("lying", 2, 2, 1),
        ("lying", 8, 2, 2),
        ("random", 4, 2, 1),
        ("none", 4, 2, 1),
    ],
)
def test_no_token_depends_on_drafts(
    make_config,
    ended_alone: Callable[[int], OneEngine],
    kind: str,
    query_len: int,
    depth: int,
    seed: int,
) -> None:
    config = replace(
        make_config(num_blocks=13),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48),
        decode_query_len=query_len,
    )
    engine, alone = OneEngine(config, depth), ended_alone(seed)
    engine.worker.runner.drafts.drafter = make_drafter(kind, answers(alone, seed))
    run_traffic(engine, seed, alone)
    if kind in ("knowing", "lying"):
        assert all(engine.counts[count] > 0 for count in range(1, query_len + 1)), engine.counts


def test_right_drafts_save_steps(make_config) -> None:
    """If all drafts are right, a step gives four tokens: penalties, minimum and log probabilities
    are those of each place.
    """
    sampling = SamplingParams(
        temperature=0.9,
        seed=7,
        max_tokens=41,
        min_tokens=30,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={3: 4.0, 17: 1.0},
        stop_token_ids=(3, 17, 30, 31, 32, 33),
        logprobs=2,
    )
    prompt = [5, 6, 7, 5, 6, 7]
    one = _run(make_config(), prompt, sampling, None)
    several = _run(
        replace(make_config(), decode_query_len=4),
        prompt,
        sampling,
        KnowingDrafter([prompt + one.tokens["a"]]),
    )
    assert several.tokens == one.tokens
    assert several.ended == one.ended
    assert len(one.tokens["a"]) >= 30
    assert not set(one.tokens["a"][:29]) & set(sampling.stop_token_ids)
    for found, expected in zip(several.logprobs["a"], one.logprobs["a"], strict=True):
        assert (found.token_ids, found.rank) == (expected.token_ids, expected.rank)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    num_steps = [engine.scheduler.stats().num_steps for engine in (one, several)]
    assert num_steps[1] <= 2 + num_steps[0] // 4 + 1
    for engine in (one, several):
        check_empty(engine)


def test_in_deterministic_mode_not_even_a_bit_depends_on_drafts(make_config) -> None:
    """Log probabilities are equal, whatever the tiles of a step with drafts."""
    sampling = SamplingParams(seed=3, temperature=0.8, max_tokens=40, logprobs=5)
    prompt = [9, 8, 7]
    plain = replace(make_config(), device=DeviceConfig(deterministic=True))
    one = _run(plain, prompt, sampling, None)
    drafter = KnowingDrafter([prompt + one.tokens["a"]], lies=0.2)
    several = _run(replace(plain, decode_query_len=4), prompt, sampling, drafter)
    assert several.counts[4] > 0
    assert several.tokens == one.tokens
    assert several.logprobs == one.logprobs
    for engine in (one, several):
        check_empty(engine)


def _run(
    config: EngineConfig, prompt: list[int], sampling: SamplingParams, drafter: Drafter | None
) -> OneEngine:
    engine = OneEngine(config, depth=1)
    engine.worker.runner.drafts.drafter = drafter
    engine.add(EngineCoreRequest(request_id="a", spec=RequestSpec(prompt, sampling)))
    engine.finish()
    return engine


def test_the_longest_sequence_has_room_for_its_drafts(make_config) -> None:
    """A request fills the model's context, in a cache that holds no more."""
    prompt, sampling = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=500)
    whole = _run(make_config(), prompt, sampling, None).tokens["a"]
    for query_len in (2, 4, 9):
        config = replace(make_config(num_blocks=13), decode_query_len=query_len)
        engine = _run(config, prompt, sampling, KnowingDrafter([prompt + whole], lies=0.3))
        assert engine.tokens["a"] == whole
        assert len(prompt + whole) == config.model.max_model_len
        assert engine.ended["a"] == "length"
        check_empty(engine)
