"""Stop strings in answers that a parser reads: they match what a client sees, in every cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from decode_node.parsers.visible_text import ParsedText, without_end
from engine.frontend.text.pieces import Piece, PieceQueue
from engine.frontend.text.stop_strings import StopStringMatcher, VisibleStops
from tests.decode_node.parsers.outputs import OUTPUTS, Output
from tests.decode_node.parsers.parsing import joined, pieces
from tests.decode_node.parsers.test_calls import new_parser, tokens_of

STOPS = [
    ("assistant",), ("analysis",), ("final",), ("json",), ("name", "Paris"), ("weather",), ("a",),
    ("arg", '": 3'), ("\n",), ("tool",), ("<",), ("ai", "ains"), ('"',), ("Hm.",), ("functions",),
]  # fmt: skip


def parser_of(output: Output) -> OutputParser:
    return new_parser(output, tokens_of(output.family))


def answer(
    output: Output, stop: tuple[str, ...], cuts: Sequence[int], *, in_reasoning: bool = True
) -> tuple[list[Delta], str | None]:
    """Plays one answer: pieces through the stop strings, and what came of them through a parser,
    in groups."""
    stream = pieces(output.text, tokens_of(output.family), 3)
    visible = ParsedText(parser_of(output), stops_in_reasoning=in_reasoning)
    stops = VisibleStops(visible, stop, keeps_match=False)
    queue, parser = PieceQueue(), parser_of(output)
    deltas: list[Delta] = []
    group: list[Piece] = []
    for place, piece in enumerate(stream):
        queue.add(piece, *stops.add(piece, may_stop=True))
        if stops.matched is not None:
            break
        group += queue.take(is_end=False)
        if place in cuts:
            deltas += parser.push(group)
            group = []
    if stops.matched is None:
        stops.finish()
    group += queue.take(is_end=True)
    last = parser.push(group) + parser.finish()
    return [*deltas, *without_end(last, stops.num_hidden)], stops.matched


def stretches(deltas: Sequence[Delta]) -> list[str]:
    """Returns the visible texts of an answer, part by part."""
    found: list[tuple[Any, str]] = []
    for delta in deltas:
        if isinstance(delta, ReasoningText | ContentText | CallArguments):
            part = (type(delta), getattr(delta, "index", 0))
            if found and found[-1][0] == part:
                found[-1] = (part, found[-1][1] + delta.text)
            else:
                found.append((part, delta.text))
    return [text for _, text in found]


def expected(output: Output, stop: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Returns what is seen of an answer up to its first stop string, from all of its text."""
    parser = parser_of(output)
    stream = pieces(output.text, tokens_of(output.family), 3)
    shown: list[str] = []
    for text in stretches(parser.push(stream) + parser.finish()):
        matcher = StopStringMatcher(stop)
        cut = matcher.push(text) + matcher.flush()
        shown += [cut] if cut else []
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown, None


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_what_is_seen_ends_at_the_first_visible_match(data: Any) -> None:
    output = data.draw(st.sampled_from(OUTPUTS))
    stop = data.draw(st.sampled_from(STOPS))
    cuts = data.draw(st.sets(st.integers(0, 80), max_size=8))
    whole, matched = answer(output, stop, ())
    streamed, _ = answer(output, stop, sorted(cuts))
    assert joined(streamed) == joined(whole)
    assert (stretches(whole), matched) == expected(output, stop)


GPT_OSS = next(o for o in OUTPUTS if str(o) == "openai: reasoning, a word before, a call")


@pytest.mark.parametrize("stop", ["assistant", "analysis", "commentary", "json", "functions", "to"])
def test_headers_hold_no_stop_strings(stop: str) -> None:
    deltas, matched = answer(GPT_OSS, (stop,), ())
    assert matched is None
    assert joined(deltas).calls == GPT_OSS.calls


def test_reasoning_holds_none_if_it_is_not_to() -> None:
    everywhere, _ = answer(GPT_OSS, ("m",), ())
    assert joined(everywhere).reasoning == "H"
    deltas, matched = answer(GPT_OSS, ("m",), (), in_reasoning=False)
    assert (joined(deltas).reasoning, joined(deltas).content, matched) == ("Hm.", "One ", "m")


def test_a_call_that_a_stop_string_cuts_has_broken_off() -> None:
    for cuts in ((), range(80)):
        deltas, _ = answer(GPT_OSS, ("days",), list(cuts))
        (call,) = joined(deltas).calls
        assert (call.arguments, call.is_complete) == ('{"city": "Paris", "', False)


def test_a_call_behind_the_end_is_no_part_of_the_answer() -> None:
    deltas: list[Delta] = [ContentText("ab"), CallStart(0, "f"), CallArguments(0, "{}")]
    assert without_end(deltas, 3) == [ContentText("a")]
