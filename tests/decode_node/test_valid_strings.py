"""Strings of JSON as models write them become valid, wherever it is cut."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.protocol.bodies.valid_strings import ValidStrings, with_valid_strings

_PARTS = (
    *('"', "\\", "u", "d", "D83d", "de00", "00e9", "a", "\n", "\x01", "é", "😀", " ", ":", "/"),
    *("\\u", "\\ud83d", "\\uDE00", "\\u00e9", '\\"', "\\\\", "\\d", '{"a": "', '"}', '"b": "'),
)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a":\n"b\n\x01c"}\n', '{"a":\n"b\\n\\u0001c"}\n'),
        ('["\\d+\\s", "\\"\\\\d"]', '["\\\\d+\\\\s", "\\"\\\\d"]'),
        ('["\\ud83d\\ude00", "\\ud83d"]', '["\\ud83d\\ude00", "\\ufffd"]'),
        ('["\\ude00\\ud83d\\d"]', '["\\ufffd\\ufffd\\\\d"]'),
        ('["\\u12", "\\ud83d\\u0041"]', '["\\\\u12", "\\ufffd\\u0041"]'),
        ("{\\d\n}", "{\\d\n}"),
        ('["a\\', '["a'),
        ('["a\\ud83d\\ude', '["a'),
    ],
)
def test_what_is_no_json_in_strings_becomes_some(text: str, valid: str) -> None:
    assert with_valid_strings(text) == valid


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(_PARTS), max_size=16), st.integers(1, 5))
def test_pieces_make_what_the_whole_does(parts: list[str], size: int) -> None:
    text = "".join(parts)
    strings = ValidStrings()
    pieces = [strings.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(pieces) == with_valid_strings(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_PARTS), max_size=12))
def test_a_string_is_valid_in_the_end_and_a_valid_one_stays(parts: list[str]) -> None:
    inner = "".join(parts).replace('"', "").rstrip("\\")
    found = json.loads(with_valid_strings(f'["{inner}"]'))
    json.dumps(found, ensure_ascii=False).encode()
    text = json.dumps(["".join(parts)])
    assert with_valid_strings(text) == text


@pytest.mark.parametrize("pieces", [("\\n",), ("a\\n", "b"), ("\\d",), ('", "', "c")])
def test_a_long_text_is_read_in_little_memory(pieces: tuple[str, ...]) -> None:
    """`re` keeps what it has repeated, so that it could go back."""
    text = '["' + "".join(pieces) * 100_000 + '"]'
    tracemalloc.start()
    found = json.loads(with_valid_strings(text))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 * len(text)
    whole = "".join(pieces) * 100_000
    assert '", "'.join(found) == whole.replace("\\n", "\n")
