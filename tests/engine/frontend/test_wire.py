"""Tests that what crosses between nodes arrives as it was sent."""

from __future__ import annotations

import struct
from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.outputs import PromptLogprobs, SiblingTokens, TokenLogprobs
from engine.frontend.wire import (
    logprobs_from_message,
    logprobs_to_message,
    prompt_logprobs_from_message,
    prompt_logprobs_to_message,
    siblings_from_messages,
    siblings_to_messages,
)
from tandem_pb import prefill_pb2

TOKENS = st.integers(0, (1 << 31) - 1)


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


@given(ids=st.lists(TOKENS, max_size=5), asks=st.booleans())
def test_first_tokens_of_further_answers(ids: list[int], asks: bool) -> None:
    found = [TokenLogprobs([id_, 1], [-1.0, -0.5], 2) for id_ in ids]
    siblings = SiblingTokens(ids, found if asks else [])
    message = prefill_pb2.FirstToken(siblings=siblings_to_messages(siblings))
    sent = prefill_pb2.FirstToken.FromString(message.SerializeToString())
    assert siblings_from_messages(sent.siblings) == siblings


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
