"""Whatever a prefill node says of a prompt is either what was asked for, or refused."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.disagg.prefill_events import FirstToken, KVTaken, PrefillError, PrefillEvents
from engine.contracts.outputs import PromptLogprobs
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from tandem_pb import prefill_pb2

VOCAB = 1024
PROMPT = [5, 6, 7, 8]


def reader(num_choices: int = 1, **sampling: Any) -> PrefillEvents:
    seeds = tuple(range(1, num_choices))
    return PrefillEvents(
        RequestSpec(PROMPT, SamplingParams(**sampling), sibling_seeds=seeds), VOCAB
    )


def token(
    token_id: int = 9,
    ids: Sequence[int] = (9, 9, 3),
    logprobs: Sequence[float] = (-0.5, -0.5, -2.0),
    rank: int = 1,
    **more: Any,
) -> prefill_pb2.PrefillEvent:
    found = prefill_pb2.TokenLogprobs(token_ids=ids, logprobs=logprobs, rank=rank)
    first = prefill_pb2.FirstToken(token_id=token_id, logprobs=found, **more)
    return prefill_pb2.PrefillEvent(first_token=first)


def bare(token_id: int, **more: Any) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token_id=token_id, **more))


def of_prompt(
    first: int = 1,
    num_top: int = 1,
    ids: Sequence[int] = (6, 1, 7, 2, 8, 3),
    logprobs: Sequence[float] = (-1.0,) * 6,
    ranks: Sequence[int] = (1, 2, 3),
    cut: int = 0,
) -> prefill_pb2.PrefillEvent:
    message = prefill_pb2.PromptLogprobs(
        first_position=first,
        num_top=num_top,
        token_ids=array("i", ids).tobytes()[: len(ids) * 4 - cut],
        logprobs=array("f", logprobs).tobytes(),
        ranks=array("i", ranks).tobytes(),
    )
    return prefill_pb2.PrefillEvent(prompt_logprobs=message)


def refused(events: PrefillEvents, *messages: prefill_pb2.PrefillEvent) -> None:
    *fine, wrong = messages
    for message in fine:
        events.read(message)
    with pytest.raises(PrefillError) as caught:
        events.read(wrong)
    assert caught.value.code == "wrong_answer"


def test_what_was_asked_for_is_read() -> None:
    events = reader(logprobs=2, prompt_logprobs=1)
    part = events.read(
        of_prompt(ids=(6, 1, 7, 2), logprobs=(-1.0, -math.inf) * 2, ranks=(1, VOCAB))
    )
    assert isinstance(part, PromptLogprobs) and part.unpack()[1].token_ids == [7, 2]
    events.read(of_prompt(3, ids=(8, 3), logprobs=(-1.0, -2.0), ranks=(1,)))
    first = events.read(token(num_cached_tokens=99, queue_s=math.nan, prefill_s=0.5))
    assert isinstance(first, FirstToken) and first.logprobs is not None
    assert (first.num_cached_tokens, first.queue_s, first.prefill_s) == (4, 0.0, 0.5)
    assert events.read(prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())) is None
    assert events.read(prefill_pb2.PrefillEvent(done=prefill_pb2.Done())) == KVTaken()


@pytest.mark.parametrize("seconds", [math.inf, -1.0, 1e200])
def test_times_that_make_no_sense_are_none(seconds: float) -> None:
    first = reader().read(prefill_pb2.PrefillEvent(
        first_token=prefill_pb2.FirstToken(token_id=1, queue_s=seconds, prefill_s=seconds)
    ))  # fmt: skip
    assert isinstance(first, FirstToken) and (first.queue_s, first.prefill_s) == (0.0, 0.0)


@pytest.mark.parametrize("token_id", [VOCAB, 100_000, 2**32 - 1])
def test_tokens_outside_of_the_vocabulary(token_id: int) -> None:
    refused(reader(), bare(token_id))
    refused(reader(logprobs=2), token(ids=(9, 9, token_id)))


@pytest.mark.parametrize(
    "wrong",
    [
        token(ids=(9, 9), logprobs=(-1.0, -1.0)),
        token(ids=(9, 9, 3, 4), logprobs=(-1.0,) * 4),
        token(logprobs=(-1.0,)),
        token(ids=(3, 9, 9)),
        token(rank=0),
        token(rank=VOCAB + 1),
        token(logprobs=(math.nan, -1.0, -1.0)),
        token(logprobs=(0.5, -1.0, -1.0)),
        bare(9),
    ],
)
def test_log_probabilities_that_do_not_fit(wrong: prefill_pb2.PrefillEvent) -> None:
    refused(reader(logprobs=2), wrong)


def sibling(
    token_id: int = 3, ids: Sequence[int] = (3, 9, 4), rank: int = 2
) -> prefill_pb2.SiblingToken:
    found = prefill_pb2.TokenLogprobs(token_ids=ids, logprobs=(-1.0, -0.5, -2.0), rank=rank)
    return prefill_pb2.SiblingToken(token_id=token_id, logprobs=found)


def test_first_tokens_of_all_answers_are_read() -> None:
    first = reader(3, logprobs=2).read(token(siblings=[sibling(), sibling(4, (4, 9, 3))]))
    assert isinstance(first, FirstToken) and first.siblings is not None
    assert first.siblings.token_ids == [3, 4]
    assert [found.token_ids[0] for found in first.siblings.logprobs] == [3, 4]
    only = reader(2).read(bare(9, siblings=[prefill_pb2.SiblingToken(token_id=8)]))
    assert isinstance(only, FirstToken) and only.siblings is not None
    assert (only.siblings.token_ids, only.siblings.logprobs) == ([8], [])


@pytest.mark.parametrize(
    "siblings",
    [
        [],
        [sibling()],
        [sibling()] * 3,
        [sibling(), sibling(VOCAB, (VOCAB, 9, 3))],
        [sibling(), sibling(3, (4, 9, 3))],
        [sibling(), sibling(rank=0)],
        [sibling(), prefill_pb2.SiblingToken(token_id=3)],
    ],
)
def test_first_tokens_that_do_not_fit(siblings: list[prefill_pb2.SiblingToken]) -> None:
    refused(reader(3, logprobs=2), token(siblings=siblings))


def test_first_tokens_of_answers_that_nobody_asked_for() -> None:
    refused(reader(logprobs=2), token(siblings=[sibling()]))


def test_log_probabilities_that_nobody_asked_for() -> None:
    refused(reader(), token())
    refused(reader(), of_prompt())


def test_one_first_token_is_enough() -> None:
    refused(reader(), bare(9), bare(9))
    refused(reader(prompt_logprobs=1), of_prompt(), bare(9), of_prompt())


@pytest.mark.parametrize(
    "wrong",
    [
        bare(9),
        of_prompt(0),
        of_prompt(2, ids=(7, 1, 8, 1), logprobs=(-1.0,) * 4, ranks=(1, 1)),
        of_prompt(num_top=2**32 - 1),
        of_prompt(num_top=0),
        of_prompt(ids=(6, 1, 7, 2, 9, 3)),
        of_prompt(ids=(6, 1, 7, 2, 8, -1)),
        of_prompt(ids=(6, 1, 7, 2, 8, VOCAB)),
        of_prompt(ids=(6, 1) * 4, logprobs=(-1.0,) * 8, ranks=(1,) * 4),
        of_prompt(logprobs=(-1.0,) * 5),
        of_prompt(logprobs=(-1.0,) * 5 + (math.nan,)),
        of_prompt(ranks=(1, 2, 0)),
        of_prompt(ids=(), logprobs=(), ranks=()),
        of_prompt(cut=1),
    ],
)
def test_log_probabilities_of_the_prompt_that_do_not_fit(wrong: prefill_pb2.PrefillEvent) -> None:
    refused(reader(prompt_logprobs=1), wrong)


def test_failures_have_known_names_and_bounded_reasons() -> None:
    for code, known in (("engine_dead", "engine_dead"), ("x" * 9999, "failed"), ("", "failed")):
        failed = prefill_pb2.Failed(code=code, message="m" * 9999)
        with pytest.raises(PrefillError) as caught:
            reader().read(prefill_pb2.PrefillEvent(failed=failed))
        assert caught.value.code == known and len(str(caught.value)) <= 500


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else(data: bytes) -> None:
    message = prefill_pb2.PrefillEvent()
    try:
        message.ParseFromString(b"\x12" + bytes([len(data) & 0x7F]) + data)
    except Exception:
        return
    try:
        event = reader(logprobs=2, prompt_logprobs=1).read(message)
    except PrefillError:
        return
    assert event is None or isinstance(event, KVTaken)
