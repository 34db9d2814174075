"""What crosses between nodes arrives as it was sent."""

from __future__ import annotations

import struct
from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.wire import (
    logprobs_from_message,
    logprobs_to_message,
    prompt_logprobs_from_message,
    prompt_logprobs_to_message,
    sampling_from_message,
    sampling_to_message,
)
from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.sampling_params import SamplingParams
from tandem_pb import prefill_pb2

TOKENS = st.integers(0, (1 << 31) - 1)
REALS = st.floats(allow_nan=False, allow_infinity=False)

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1 << 20),
    min_tokens=st.integers(0, 1 << 20),
    temperature=REALS,
    top_k=st.integers(0, (1 << 31) - 1),
    top_p=REALS,
    min_p=REALS,
    repetition_penalty=REALS,
    presence_penalty=REALS,
    frequency_penalty=REALS,
    logit_bias=st.dictionaries(TOKENS, REALS, max_size=5),
    seed=st.integers(0, (1 << 64) - 1),
    stop=st.just(()),
    stop_token_ids=st.lists(TOKENS, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    prompt_logprobs=st.one_of(st.none(), st.integers(0, 20)),
)


def test_every_field_but_stop_strings_has_a_place() -> None:
    """A new sampling parameter that is forgotten on the wire would change answers in silence."""
    ours = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert ours - set(prefill_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == {"stop"}


@given(params=PARAMS)
def test_sampling_parameters(params: SamplingParams) -> None:
    sent = sampling_to_message(params).SerializeToString()
    assert sampling_from_message(prefill_pb2.SamplingParams.FromString(sent)) == params


@given(
    ids=st.lists(TOKENS, min_size=1, max_size=21),
    rank=st.integers(1, 1 << 17),
    logprob=st.floats(width=32, max_value=0, allow_nan=False),
)
def test_log_probabilities(ids: list[int], rank: int, logprob: float) -> None:
    logprobs = TokenLogprobs(ids, [logprob] * len(ids), rank)
    sent = logprobs_to_message(logprobs).SerializeToString()
    assert logprobs_from_message(prefill_pb2.TokenLogprobs.FromString(sent)) == logprobs
    assert struct.unpack("f", struct.pack("f", logprob))[0] == logprob


def test_log_probabilities_of_prompts() -> None:
    part = PromptLogprobs(
        5, 1, array("i", [9, 1, 8, 2]).tobytes(), array("f", [-1, -0.5, -2, -0.25]).tobytes(),
        array("i", [7, 3]).tobytes(),
    )  # fmt: skip
    sent = prompt_logprobs_to_message(part).SerializeToString()
    found = prompt_logprobs_from_message(prefill_pb2.PromptLogprobs.FromString(sent))
    assert found == part
    assert found.unpack() == [
        TokenLogprobs([9, 1], [-1.0, -0.5], 7),
        TokenLogprobs([8, 2], [-2.0, -0.25], 3),
    ]
