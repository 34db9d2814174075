"""Tests of `bench.engine.sweep`, `random_steps`, `contexts` and what they drive."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.engine.models.shapes import shape_config
from bench.engine.random_steps import RandomTraffic
from bench.engine.sweep import Case, compare, draw
from bench.engine.timing.bare_steps import BareSteps
from engine.contracts.sampling_params import check_sampling


@pytest.fixture(scope="module")
def steps() -> Iterator[BareSteps]:
    config = shape_config(
        "tiny-experts", device="cpu", num_layers=1, max_model_len=512, max_num_seqs=4,
        max_num_batched_tokens=48, block_size=16,
    )  # fmt: skip
    config = replace(config, cache=replace(config.cache, num_blocks=128))
    steps = BareSteps(config)
    yield steps
    steps.shutdown()


def test_bare_steps_begin_behind_any_context_and_end_empty(steps: BareSteps) -> None:
    assert steps.decode_s([16, 400, 33]) > 0
    assert steps.prompts_s([(100, 0), (30, 200)]) > 0
    assert not steps.runner.states.is_live_np.any()
    assert steps.decode_s([7]) > 0


def test_prompts_take_as_many_steps_as_their_budget_makes(steps: BareSteps) -> None:
    assert steps.chunks([100, 30]) == [[(0, 48)], [(0, 48)], [(0, 4), (1, 30)]]


def test_bare_steps_know_what_fits(steps: BareSteps) -> None:
    assert steps.fits([400, 400])
    assert not steps.fits([500])
    assert not steps.fits([16] * 5)
    assert not steps.fits([450, 450, 450, 450, 450])


def test_cases_are_drawn_alike_from_one_seed_and_of_both_kinds() -> None:
    cases = draw(random.Random(3), 40)
    assert cases == draw(random.Random(3), 40)
    assert {case.kind for case in cases} == {"decode", "prompts"}
    assert any(case.is_mixed for case in cases) and any(case.before for case in cases)
    assert any(len(case.lengths) == 1 for case in cases)


def test_a_case_on_the_line_between_its_neighbours_is_no_cliff() -> None:
    case = Case("prompts", (1000,))
    assert compare("8b", case, [0.008, 0.010, 0.0125]).ratio == 1.0
    assert not compare("8b", case, [0.008, 0.0114, 0.0125]).is_cliff
    assert compare("8b", case, [0.008, 0.0125, 0.0125]).is_cliff
    assert compare("8b", case, [0.008, 0.008, 0.0125]).is_cliff


def test_prompts_end_chunk_by_chunk(steps: BareSteps) -> None:
    ends = steps.prompt_ends([(100, 0)])
    assert len(ends) == 3 and ends == sorted(ends) and ends[0] > 0


def test_random_traffic_is_what_requests_may_ask() -> None:
    traffic = RandomTraffic(seed=1, vocab_size=1000, max_model_len=2048, max_num_seqs=16)
    made = [request for step in range(2000) for request in traffic.requests(step, num_running=0)]
    assert len({request.request_id for request in made}) == len(made) > 1000
    for request in made:
        check_sampling(request.spec.sampling, 1000)
        total = len(request.spec.prompt_token_ids) + request.spec.sampling.max_tokens
        assert request.spec.sampling.max_tokens >= 1 and total <= 2048
    assert any(request.choice_ids for request in made)
    assert any(request.spec.sampling.beam for request in made)
