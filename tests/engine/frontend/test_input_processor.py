"""Every request that is wrong is refused with the field's name; every other is completed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.contracts.errors import InvalidRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import MAX_GRAMMAR_BYTES, SamplingParams
from engine.contracts.token_parts import MOST_TOGETHER
from engine.frontend.input_processor import InputProcessor, choose_seed, wrong_token
from tests.engine.core.tiny_engine import MAX_LEN, VOCAB, tiny_config

PROCESSOR = InputProcessor(tiny_config())
PROMPT = [3, 4, 5]


def refusal(prompt: list[int] = PROMPT, max_tokens: int | None = 4, **sampling: Any) -> str | None:
    """Returns the named parameter; the message must say something."""
    with pytest.raises(InvalidRequest) as caught:
        spec = RequestSpec(prompt, SamplingParams(**sampling))
        PROCESSOR.complete(spec, max_tokens=max_tokens)
    assert len(str(caught.value)) > 10
    return caught.value.param


def test_a_good_request_is_completed() -> None:
    request = PROCESSOR.process("r", RequestSpec(PROMPT, priority=3), max_tokens=None)
    assert request.spec.sampling.max_tokens == MAX_LEN - len(PROMPT)
    assert request.eos_token_ids == (0,)
    assert (request.spec.priority, request.spec.prompt_token_ids) == (3, PROMPT)


def test_seeds_are_kept_or_drawn() -> None:
    assert choose_seed(5) == 5
    assert choose_seed(5, 2) == 7
    assert choose_seed(-1) == (1 << 64) - 1
    assert choose_seed((1 << 64) - 1, 1) == 0
    assert choose_seed(None) != choose_seed(None)


def test_the_context_message_says_both_numbers() -> None:
    with pytest.raises(InvalidRequest) as caught:
        PROCESSOR.complete(RequestSpec(PROMPT), max_tokens=MAX_LEN)
    assert f"{len(PROMPT)} + {MAX_LEN} > {MAX_LEN}" in str(caught.value)
    assert caught.value.code == "context_length_exceeded"


def test_an_answer_is_cut_to_the_context_where_that_is_allowed() -> None:
    processor = InputProcessor(tiny_config(), cuts_answers=True)
    left = MAX_LEN - len(PROMPT)
    for asked, granted in ((left - 1, left - 1), (left, left), (left + 1, left), (1 << 40, left)):
        spec = processor.complete(RequestSpec(PROMPT), max_tokens=asked)
        assert spec.sampling.max_tokens == granted
        again = processor.complete(spec.resumed_after([5, 6]), max_tokens=asked)
        assert again.sampling.max_tokens == granted
    for prompt, wrong in (([1] * MAX_LEN, 9), (PROMPT, 0)):
        with pytest.raises(InvalidRequest):
            processor.complete(RequestSpec(prompt), max_tokens=wrong)


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [([], 4), ([-1], 4), ([VOCAB], 4), ([1] * MAX_LEN, None)]
)
def test_wrong_prompts(prompt: list[int], max_tokens: int | None) -> None:
    assert refusal(prompt, max_tokens) == "prompt"


class _InParts(list[int]):
    """Lets nobody walk through all of it in one call, which would hold the event loop up."""

    def __iter__(self) -> Any:
        raise AssertionError("all ids at once")

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        assert not isinstance(found, list) or len(found) <= MOST_TOGETHER
        return found


@pytest.mark.parametrize("place", [0, MOST_TOGETHER, 2 * MOST_TOGETHER + 5, None])
def test_ids_of_long_prompts_are_checked_in_parts(place: int | None) -> None:
    ids = _InParts([3] * (2 * MOST_TOGETHER + 9))
    if place is not None:
        ids[place] = VOCAB
    assert wrong_token(ids, VOCAB) == place


@pytest.mark.parametrize("max_tokens", [0, -1, MAX_LEN])
def test_wrong_max_tokens(max_tokens: int) -> None:
    assert refusal(max_tokens=max_tokens) == "max_tokens"


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1])
def test_numbers_out_of_range(name: str, value: float) -> None:
    assert refusal(**{name: value}) == name


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"top_k": -1},
        {"top_k": 1 << 31},
        {"no_repeat_ngram_size": -1},
        {"no_repeat_ngram_size": 129},
        {"min_tokens": 5},
        {"min_tokens": -1},
        {"logprobs": 129},
        {"logprob_token_ids": (3,)},
        {"logprob_token_ids": (3, 3), "logprobs": 2},
        {"logprobs": -1},
        {"stop": ("",)},
        {"stop": ("x" * 257,)},
        {"stop": ("x",) * 65},
        {"stop_token_ids": (VOCAB,)},
        {"stop_token_ids": (1,) * 257},
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 101.0}},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (VOCAB,)},
        {"allowed_token_ids": (1, -1)},
        {"allowed_token_ids": (1,) * 4097},
        {"allowed_token_ids": (0, 7), "min_tokens": 1, "stop_token_ids": (7,)},
        {"bad_words": ((1,), ())},
        {"bad_words": ((1, VOCAB),)},
        {"bad_words": ((1,),) * 513},
        {"bad_words": ((1,) * 33,)},
        {"grammar": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)},
        {"grammar": "start: \ud800"},
        {"ignore_eos": True, "grammar": "start: /a/"},
    ],
)
def test_wrong_sampling_names_its_field(sampling: dict[str, Any]) -> None:
    assert refusal(**sampling) == next(iter(sampling))


def test_without_chunked_prefill_long_prompts_are_refused() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=8, enable_chunked_prefill=False)
    processor = InputProcessor(replace(tiny_config(), scheduler=scheduler))
    processor.complete(RequestSpec([1] * 8), max_tokens=1)
    with pytest.raises(InvalidRequest, match="8"):
        processor.complete(RequestSpec([1] * 9), max_tokens=1)


@pytest.mark.parametrize("resumed", [[VOCAB], [-1], [1, 2, 3, 4], []])
def test_output_of_another_request_is_not_continued(resumed: list[int]) -> None:
    spec = RequestSpec(PROMPT).resumed_after(resumed)
    if not resumed:
        assert PROCESSOR.complete(spec, max_tokens=4).prompt_token_ids == PROMPT
        return
    with pytest.raises(InvalidRequest) as caught:
        PROCESSOR.complete(spec, max_tokens=4)
    assert caught.value.param == "resume"


@given(
    temperature=st.floats(),
    top_p=st.floats(),
    top_k=st.integers(),
    max_tokens=st.one_of(st.none(), st.integers()),
    stop=st.lists(st.text(), max_size=3),
)
def test_anything_is_refused_or_in_range(
    temperature: float, top_p: float, top_k: int, max_tokens: int | None, stop: list[str]
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, stop=tuple(stop))
    try:
        sampling = PROCESSOR.complete(RequestSpec(PROMPT, params), max_tokens=max_tokens).sampling
    except InvalidRequest:
        return
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 1 <= sampling.max_tokens <= MAX_LEN - len(PROMPT)
