"""Tokens to outputs: text, ends, and token one from another node."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.outputs import PromptLogprobs, TokenLogprobs
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import OutputProcessor, RequestOutput
from engine.frontend.text.pieces import Piece
from engine.frontend.text.text_options import TextOptions
from engine.frontend.text.visible_text import PieceReader, Stretch
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


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (TextOptions(), "dog"),
        (TextOptions(include_stop_str_in_output=True), "dog"),
        (TextOptions(skip_special_tokens=False), "<|user|>dog"),
        (TextOptions(skip_special_tokens=False, include_stop_str_in_output=True), None),
    ],
)
def test_special_tokens_and_the_end_are_shown_to_who_asks(
    options: TextOptions, shown: str | None
) -> None:
    request = GenerationRequest("r", RequestSpec([5, 6]), eos_token_ids=(EOS,), text=options)
    output = OutputProcessor(request, byte_level()).process(
        [USER, *tokens("dog"), EOS], finish_reason="stop"
    )
    assert output.text == (shown or "<|user|>dog</s>")


def test_a_stop_string_that_is_shown_ends_the_text() -> None:
    text = TextOptions(include_stop_str_in_output=True)
    sampling = SamplingParams(max_tokens=100, stop=("own",))
    request = GenerationRequest("r", RequestSpec([5, 6], sampling), text=text)
    process = OutputProcessor(request, byte_level())
    outputs = [
        process.process([token]) for token in tokens("the brown fox") if not process.finished
    ]
    assert collect(outputs) == "the brown"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "own")


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


USER, END = 2, 3
"""Special tokens of the byte-level tokenizer, named as markers below."""


class ShownText:
    """Reads all text as visible, but keeps an `a` back until more comes. Markers begin another
    part."""

    def __init__(self) -> None:
        self._kept = ""
        self._part = 0

    def push(self, piece: Piece) -> list[Stretch]:
        if not isinstance(piece, str):
            found = self.finish()
            self._part += 1
            return found
        text = self._kept + piece
        self._kept = "a" if text.endswith("a") else ""
        return [Stretch(str(self._part), text.removesuffix("a"))]

    def finish(self) -> list[Stretch]:
        kept, self._kept = self._kept, ""
        return [Stretch(str(self._part), kept)]


def with_markers(
    *, shown: bool = False, none: bool = False, shows_stop: bool = False, **sampling: Any
) -> OutputProcessor:
    """Makes a processor whose request names two markers, or `none`. Tokenizers hide them, or show
    them if they are no special tokens."""
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    request = GenerationRequest(
        "r",
        RequestSpec([5, 6], params),
        eos_token_ids=(EOS,),
        text=TextOptions(include_stop_str_in_output=shows_stop),
        reader=PieceReader(frozenset() if none else frozenset((USER, END)), ShownText),
    )
    return OutputProcessor(request, ShowsSpecialTokens() if shown else byte_level())


class ShowsSpecialTokens:
    def decode(self, token_ids: list[int], **options: bool) -> str:
        return byte_level().decode(token_ids, skip_special_tokens=False)


def in_cuts(process: OutputProcessor, ids: list[int], cuts: list[int], **end: Any) -> list[Any]:
    """Gives the tokens in groups, the last with the end of the request, and returns all outputs."""
    edges = [0, *sorted(cuts), len(ids)]
    groups = [ids[start:stop] for start, stop in pairwise(edges)]
    outputs = [process.process(group) for group in groups[:-1]]
    return [*outputs, process.process(groups[-1], **{"finish_reason": "length", **end})]


def pieces_of(outputs: list[RequestOutput]) -> list[str | int]:
    return [piece for output in outputs for piece in output.pieces or []]


def test_only_requests_that_name_markers_get_pieces() -> None:
    assert processor().process([USER, *tokens("dog")]).pieces is None


def test_a_reader_whose_model_has_no_markers_gets_all_text() -> None:
    ids = tokens("the dog")
    output = with_markers(none=True).process([*ids, USER])
    assert output.pieces is not None
    assert "".join(map(str, output.pieces)) == "the dog"


def test_pieces_are_the_text_of_each_token_and_the_ids_of_markers() -> None:
    ids = tokens("the dog")
    output = with_markers().process([*ids, USER, *ids, END])
    words = [byte_level().decode([id_]) for id_ in ids]
    assert output.pieces == [*words, USER, *words, END]
    assert output.text == ""


def test_text_that_spells_a_marker_is_no_marker() -> None:
    output = with_markers().process([*tokens("<|us"), *tokens("er|>"), USER])
    assert output.pieces is not None
    assert [piece for piece in output.pieces if isinstance(piece, int)] == [USER]
    assert "".join(map(str, output.pieces)) == f"<|user|>{USER}"


def test_a_marker_ends_a_character_that_is_not_complete() -> None:
    broken = tokens("ü")[:1]
    for cuts in ([], [1], [2], [1, 2]):
        outputs = in_cuts(with_markers(), [*broken, USER, *tokens("x")], cuts)
        assert pieces_of(outputs) == ["", "\ufffd", USER, "x"]


def test_a_stop_token_is_a_piece_only_as_a_marker() -> None:
    ids = tokens("dog")
    for stop, expected in ((END, [END]), (EOS, [])):
        output = with_markers().process([*ids, stop], finish_reason="stop")
        assert output.pieces == [*(byte_level().decode([id_]) for id_ in ids), *expected]


def seen(outputs: list[RequestOutput]) -> str:
    """Returns what a client sees of the answer: `|` stands between parts."""
    text = "".join(piece if isinstance(piece, str) else "|" for piece in pieces_of(outputs))
    hidden = outputs[-1].num_hidden
    while hidden:
        hidden -= text[-1] != "|"
        text = text[:-1]
    return text


@pytest.mark.parametrize(
    ("stop", "text", "is_shown"),
    [
        ("x", "dog|fo", False),
        ("x", "dog|fox", True),
        ("dog", "", False),
        ("<|user|>", "dog|fox", False),
        ("gf", "dog|fox", False),
        ("g|f", "dog|fox", False),
    ],
)
def test_stop_strings_match_in_visible_text_alone(stop: str, text: str, is_shown: bool) -> None:
    process = with_markers(shown=True, stop=(stop,))
    if is_shown:
        process = with_markers(shown=True, stop=(stop,), shows_stop=True)
    ids = [*tokens("dog"), USER, *tokens("fox")]
    assert seen(in_cuts(process, ids, [])) == text


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_and_what_is_seen_do_not_depend_on_cuts(data: Any) -> None:
    """Hidden and shown markers, stop strings or none, characters broken at any place."""
    ids = data.draw(st.lists(st.sampled_from([*tokens("ab ü の"), *tokens("の")[:2], USER, END])))
    shown = data.draw(st.booleans())
    stop = data.draw(st.sampled_from([(), ("ab",), ("a", "b b"), ("<|", "ü"), ("\ufffd",)]))
    cuts = data.draw(st.lists(st.integers(0, len(ids))))
    whole = in_cuts(with_markers(shown=shown, stop=stop), ids, [])
    process = with_markers(shown=shown, stop=stop)
    outputs: list[RequestOutput] = []
    for start, end in pairwise([0, *sorted(cuts), len(ids)]):
        if not process.finished:
            outputs.append(process.process(ids[start:end]))
    if not process.finished:
        outputs.append(process.process([], finish_reason="length"))
    assert pieces_of(outputs) == pieces_of(whole)
    assert seen(outputs) == seen(whole)
    assert not seen_stop(outputs, stop)
    if not stop:
        assert [p for p in pieces_of(outputs) if isinstance(p, int)] == [
            i for i in ids if i in (USER, END)
        ]


def seen_stop(outputs: list[RequestOutput], stop: tuple[str, ...]) -> bool:
    """Says whether a client has seen a stop string, which is in one part."""
    return any(one in part for part in seen(outputs).split("|") for one in stop)
