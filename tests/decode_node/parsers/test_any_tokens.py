"""Whatever a model writes: no error, the same for every cut, nothing lost, in linear time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.parsers.text.schema_types import literal_json, value_json
from decode_node.parsers.text.text_input import TextInput
from engine.frontend.text.pieces import Piece
from tests.decode_node.parsers.outputs import FAMILIES, TOOLS
from tests.decode_node.parsers.parsing import joined, merged, parse, pieces, random_cuts
from tests.decode_node.parsers.test_calls import parsers_of, tokens_of

_WORDS = [
    *("x", " ", "\n", "é", "\ufffd", "", "<", ">", "</", "[", "]", "(", ")", "{", "}", '"', "'"),
    *("\\", ",", ":", ";", "=", "to=", "null", "-1", "now", "get_weather", "functions.now:0"),
    *('{"name": "now", "arguments": ', '{"name": "rm", "parameters": ', '{"a": "', '"}', "{}}"),
    *("now(", "city=", "[now()]", "<parameter=city>", '"name"', '"arguments"', 'string="true"'),
]

END_OF_REASONING = r"(?:</(?:seed:|mm:)?think>|\[/THINK\])"


@cache
def soup(family: str) -> st.SearchStrategy[list[Piece]]:
    """Draws pieces: markers as tokens and as text, fragments of calls, and anything else."""
    tokens = tokens_of(family)
    return st.lists(
        st.one_of(
            st.sampled_from([*tokens.values()]),
            st.sampled_from([*tokens, *(token[:-2] for token in tokens)]),
            st.sampled_from(_WORDS),
            st.text(max_size=4),
        ),
        max_size=40,
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_pieces_are_read_the_same_in_every_cut(family: str, data: Any) -> None:
    stream = data.draw(soup(family))
    made = parsers_of(family, tokens_of(family) if data.draw(st.booleans()) else {})
    is_open = data.draw(st.booleans())

    def read(pushes: list[list[Piece]]) -> Any:
        return parse(made.parser(TOOLS, is_reasoning_open=is_open), pushes)

    whole = read([stream])
    assert read([[piece] for piece in stream]) == whole
    assert read(random_cuts(stream, data.draw(st.integers(0, 99)))) == whole
    long_tokens = read([merged(stream)])
    long_tokens.num_reasoning_tokens = whole.num_reasoning_tokens
    assert long_tokens == whole
    json.dumps([whole.reasoning, whole.content, *(c.arguments for c in whole.calls)]).encode()
    assert whole.num_reasoning_tokens <= sum(isinstance(piece, str) for piece in stream)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_without_calls_nothing_is_lost(family: str, data: Any) -> None:
    """Reasoning and content are the text, with all markers spelled out that mark no reasoning and
    stand around no part."""
    tokens = tokens_of(family)
    stream = data.draw(soup(family))
    made = parsers_of(family, tokens)
    answer = parse(made.parser(TOOLS), [stream])
    names = {id_: token for token, id_ in tokens.items()}
    text = "".join(names[piece] if isinstance(piece, int) else piece for piece in stream)
    given = answer.reasoning + answer.content
    if answer.calls:
        return
    if family in (
        "openai",
        "kimi_k2",
        "kimi_k3",
        "solar_open",
        "gigachat30",
        "gemma4",
        "muse_glimmer",
    ):
        assert is_subsequence(given, text)
    elif not answer.reasoning:
        not_thought = re.sub(rf"^\s*{END_OF_REASONING}", "", text)
        assert given in (text, not_thought, *without_markers(text))
    else:
        assert given in without_markers(text)


def without_markers(text: str) -> set[str]:
    """Returns the text without a marker of reasoning at its beginning, and without any one of the
    markers that may end it."""
    begins = re.match(r"\s*(<(?:seed:|mm:)?think>|\[THINK\])", text)
    if begins is None:
        return set()
    rest = text[begins.end() :]
    ends = re.finditer(END_OF_REASONING, rest)
    return {rest, *(rest[: end.start()] + rest[end.end() :] for end in ends)}


def is_subsequence(part: str, whole: str) -> bool:
    characters = iter(whole)
    return all(char in characters for char in part if char != "\n")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *('{"name": "now", "arguments": ', "{}", '{"z": "', '"}', "}", "x", " ", "\n", '"'),
                *("</tool_call>", "<tool_call>", "\\", "<tool", "null"),
            ]
        ),
        max_size=30,
    )
)
def test_beside_calls_nothing_is_lost(words: list[str]) -> None:
    """No letter of content or of arguments, which alone have these two, is lost or doubled."""
    tokens = tokens_of("hermes")
    text = "".join(words)
    answer = parse(parsers_of("hermes", tokens).parser(TOOLS), [pieces(text, tokens, size=3)])
    given = answer.content + "".join(call.arguments for call in answer.calls)
    for letter in "xz":
        assert given.count(letter) == text.count(letter)


LONG = 6_000


def _xml(value: str) -> str:
    return f"<tool_call><function=get_weather><parameter={value}</parameter></function></tool_call>"


SLOW = {
    "arguments": ("hermes", lambda n: '<tool_call>{"name": "now", "arguments": {"a": "' + "b" * n),
    "nested": (
        "hermes",
        lambda n: '<tool_call>{"name": "now", "arguments": ' + '{"a":[' * (n // 6),
    ),
    "arguments first": (
        "hermes",
        lambda n: '<tool_call>{"arguments": {"a": "' + "\\n" * n + '"}, ',
    ),
    "encoded twice": (
        "hermes",
        lambda n: '<tool_call>{"name": "now", "arguments": "' + "{" * n + '"',
    ),
    "no calls": ("hermes", lambda n: '<tool_call>{"name": "rm"' * (n // 10)),
    "begins of markers": ("hermes", lambda n: "<tool_cal" * (n // 9)),
    "white space": ("hermes", lambda n: " \n" * n),
    "white space in a call": ("hermes", lambda n: "<tool_call>" + "\n" * n + "x"),
    "reasoning": ("hermes", lambda n: "<think>" + "</thin" * (n // 6)),
    "a long name": ("deepseek_v31", lambda n: "<｜tool▁call▁begin｜>" + "a" * n),
    "text between tags": ("qwen3_coder", lambda n: _xml("city>" + "</par" * (n // 5))),
    "ends of tags": ("qwen3_coder", lambda n: _xml("city>" + "</parameter>" * (n // 12))),
    "JSON between tags": ("qwen3_coder", lambda n: _xml("places>[" + "1," * (n // 2) + "1]")),
    "messages": ("openai", lambda n: "<|channel|>analysis<|message|>a<|end|>" * (n // 40)),
    "a header": ("openai", lambda n: "<|channel|>" + "a " * n),
    "pythonic": ("pythonic", lambda n: "[get_weather(city='" + "\\'" * n + "')]"),
    "a list": ("pythonic", lambda n: "[get_weather(places=[" + "'a'," * (n // 4) + "])]"),
    "elements": (
        "minimax_m3",
        lambda n: (
            ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<places>'
            + "]<]minimax[>[<item>a]<]minimax[>[</item>" * (n // 40)
        ),
    ),
    "ends of elements": (
        "minimax_m3",
        lambda n: (
            ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>'
            + "]<]minimax[>[</city> \n" * (n // 20)
        ),
    ),
    "messages to somebody": ("muse_glimmer", lambda n: " to=user<|message|>a<|eom|>" * (n // 25)),
    "a header of a message": ("muse_glimmer", lambda n: " to=" + "a" * n),
    "lines": ("glm4", lambda n: "now\n" * (n // 4)),
    "array": ("mistral", lambda n: "[TOOL_CALLS][" + '{"name": "now"},' * (n // 16)),
}


def cost(family: str, text: str, *, as_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns calls of functions, and characters that were looked at again because they waited."""
    tokens = tokens_of(family) if as_tokens else {}
    stream = pieces(text, tokens, size=5)
    parser = parsers_of(family, tokens).parser(TOOLS)
    spent = 0
    feed = TextInput.feed

    def counted(source: TextInput, more: str) -> None:
        nonlocal spent
        spent += len(source.text) - source.at
        feed(source, more)

    def count(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal spent
        spent += 1

    monkeypatch.setattr(TextInput, "feed", counted)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        deltas = [delta for piece in stream for delta in parser.push([piece])]
        deltas += parser.finish()
    finally:
        sys.setprofile(before)
        monkeypatch.setattr(TextInput, "feed", feed)
    joined(deltas)
    return spent


@pytest.mark.parametrize("what", SLOW)
def test_cost_grows_with_length_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, text = SLOW[what]
    make: Callable[[int], str] = text
    for as_tokens in (True, False):
        once = cost(family, make(LONG), as_tokens=as_tokens, monkeypatch=monkeypatch)
        twice = cost(family, make(2 * LONG), as_tokens=as_tokens, monkeypatch=monkeypatch)
        assert twice < 2.2 * once
        assert once < 60 * LONG


@pytest.mark.parametrize(
    "text",
    [
        *("-" * 4000 + "1", "not " * 1000 + "1", "1" + "+1" * 2000, "(" * 4000, "[" * 4000),
        *("lambda:" * 500 + "1", "a" + ".b" * 2000, "9" * 4999 + "_0", "f'{x}'", "b'x'", "'"),
        *("{1: 2}", "{**a}", "open('x')", "[1, a]", "1j", "..."),
    ],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        literal_json(text)


def test_long_strings_are_literals() -> None:
    text = "a'b\n" * 30_000
    assert json.loads(literal_json(repr(text))) == text
    assert json.loads(literal_json(f"'''{'a' * 9000}'''")) == "a" * 9000


@given(st.text(), st.sets(st.sampled_from(["string", "integer", "number", "boolean", "object"])))
def test_values_are_always_json(text: str, types: set[str]) -> None:
    json.loads(value_json(text, frozenset(types)))
