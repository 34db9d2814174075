"""Tokens to outputs: text, ends, and token one from another node."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import OutputProcessor, RequestOutput
from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.request_spec import RequestSpec
from engine.sampling_params import SamplingParams
from tests.engine.frontend.small_tokenizers import byte_level

EOS = 1


def processor(**sampling: Any) -> OutputProcessor:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    request = GenerationRequest("r", RequestSpec([5, 6], params), eos_token_ids=(EOS,))
    return OutputProcessor(request, byte_level())


def tokens(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False)


def collect(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_text_and_logprobs_come_with_their_tokens() -> None:
    ids = tokens("dog")
    logprobs = [TokenLogprobs([i], [-0.5], 1) for i in ids]
    output = processor().process(ids, logprobs, num_cached_tokens=2, queue_s=0.25)
    assert (output.token_ids, output.text, output.logprobs) == (ids, "dog", logprobs)
    assert (output.num_cached_tokens, output.queue_s) == (2, 0.25)
    assert not output.finished


def part(first_position: int, *logprobs: float) -> PromptLogprobs:
    ids = array("i", [3] * len(logprobs)).tobytes()
    return PromptLogprobs(first_position, 0, ids, array("f", logprobs).tobytes(), ids)


def test_prompt_logprobs_come_with_the_first_token() -> None:
    process = processor()
    process.add_prompt_logprobs(part(1, -1.0, -2.0))
    assert process.process([]).prompt_logprobs is None
    process.add_prompt_logprobs(part(3, -3.0))
    assert process.process([7]).prompt_logprobs == [part(1, -1.0, -2.0), part(3, -3.0)]
    process.add_prompt_logprobs(part(1, -1.0))
    assert process.process([8]).prompt_logprobs is None


def test_a_prompt_that_is_computed_again_begins_anew() -> None:
    process = processor()
    process.add_prompt_logprobs(part(1, -1.0))
    process.add_prompt_logprobs(part(1, -1.0, -2.0, -3.0))
    assert process.process_first_token(7).prompt_logprobs == [part(1, -1.0, -2.0, -3.0)]


def test_a_stop_string_ends_it_before_the_core_does() -> None:
    process = processor(stop=("stop",))
    outputs = [process.process([token]) for token in tokens("right stop here")]
    assert collect(outputs) == "right "
    last = next(output for output in outputs if output.finished)
    assert (last.finish_reason, last.stop_reason) == ("stop", "stop")
    assert process.finished


def test_tokens_after_a_stop_string_are_dropped() -> None:
    ids = tokens("ab") + tokens("c") + tokens("dog")
    output = processor(stop=("c",)).process(ids, [TokenLogprobs([i], [0.0], 1) for i in ids])
    used = len(tokens("ab") + tokens("c"))
    assert output.text == "ab"
    assert output.token_ids == ids[:used]
    assert output.logprobs is not None and len(output.logprobs) == used


def test_text_that_only_began_a_stop_string_comes_with_the_end() -> None:
    process = processor(stop=("dogs!",))
    first = process.process(tokens("the dog"))
    assert first.text == "the "
    last = process.process([], finish_reason="length")
    assert (last.text, last.finish_reason, last.stop_reason) == ("dog", "length", None)


def test_a_stop_token_has_no_text() -> None:
    ids = [*tokens("the"), tokens("x")[0]]
    output = processor(stop_token_ids=(ids[-1],)).process(
        ids, finish_reason="stop", stop_reason=ids[-1]
    )
    assert (output.text, output.token_ids, output.stop_reason) == ("the", ids, ids[-1])


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    process = processor(stop=("a",), min_tokens=3)
    outputs = [process.process([tokens("a")[0]]) for _ in range(4)]
    assert [output.text for output in outputs] == ["a", "a", "a", ""]
    assert [output.finished for output in outputs] == [False, False, False, True]


@pytest.mark.parametrize(
    ("sampling", "token", "reason", "stop_reason", "text"),
    [
        ({}, EOS, "stop", None, ""),
        ({"ignore_eos": True}, EOS, None, None, ""),
        ({"stop_token_ids": (300,)}, 300, "stop", 300, ""),
        ({"max_tokens": 1}, tokens("x")[0], "length", None, "x"),
        ({"stop": ("x",)}, tokens("x")[0], "stop", "x", ""),
        ({}, tokens("x")[0], None, None, "x"),
    ],
)
def test_token_one_may_be_the_last(
    sampling: dict[str, Any], token: int, reason: str | None, stop_reason: object, text: str
) -> None:
    process = processor(**sampling)
    output = process.process_first_token(token, TokenLogprobs([token], [-1.0], 1))
    assert output.finish_reason == reason
    assert output.stop_reason == stop_reason
    assert output.text == text
    assert process.finished == (reason is not None)
    assert output.logprobs is not None


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    request = GenerationRequest("r", RequestSpec([1], SamplingParams(stop=("a",))))
    output = OutputProcessor(request, None).process([7, 8], finish_reason="length")
    assert (output.token_ids, output.text, output.finish_reason) == ([7, 8], "", "length")


@given(
    text=st.text(alphabet="abc stop日ü", min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    stop=st.sampled_from([(), ("stop",), ("st", "top"), ("日",), ("ab", "abc")]),
    min_tokens=st.sampled_from([0, 3, 9]),
    end=st.sampled_from(["length", "stop", ""]),
)
@settings(max_examples=300, deadline=None)
def test_groups_of_tokens_give_the_same_as_single_ones(
    text: str, cuts: list[int], stop: tuple[str, ...], min_tokens: int, end: str
) -> None:
    """They are the same also where the core ends it, with the last token of a group, or only
    afterwards.
    """
    ids = tokens(text)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    groups = [ids[a:b] for a, b in pairwise(bounds)]

    def run(groups: list[list[int]]) -> tuple[object, ...]:
        process = processor(stop=stop, min_tokens=min_tokens, stop_token_ids=(ids[-1],))
        outputs: list[RequestOutput] = []
        for index, group in enumerate(groups):
            reason = end if index == len(groups) - 1 else ""
            stop_reason = ids[-1] if reason == "stop" else None
            logprobs = [TokenLogprobs([token], [-0.5], 1) for token in group]
            outputs.append(
                process.process(group, logprobs, finish_reason=reason, stop_reason=stop_reason)
            )
            if process.finished:
                break
        else:
            outputs.append(process.process([], finish_reason="abort"))
        used = [token for output in outputs for token in output.token_ids]
        chosen = [found.token_ids[0] for out in outputs for found in out.logprobs or []]
        last = outputs[-1]
        assert chosen == used
        return collect(outputs), last.finish_reason, last.stop_reason, used

    assert run([[token] for token in ids]) == run(groups)
