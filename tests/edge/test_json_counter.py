"""The count of JSON text is what a parser would build, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.http.bodies import json_counter
from edge.http.bodies.json_counter import JsonCounter
from edge.http.errors import BadRequest

TEXT = st.text(alphabet='ab"\\,[]{}.e中\n', max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def num_containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(num_containers(item) for item in value.values())
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


def num_strings(value: Any) -> int:
    if isinstance(value, dict):
        return sum(num_strings(name) + num_strings(item) for name, item in value.items())
    return sum(map(num_strings, value)) if isinstance(value, list) else isinstance(value, str)


def num_commas(value: Any) -> int:
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, list):
        return 0
    return max(0, len(items) - 1) + sum(map(num_commas, items))


@given(value=JSON, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_counts_are_those_of_the_text(value: Any, sizes: list[int]) -> None:
    data, counter, at = json.dumps(value).encode(), JsonCounter(), 0
    while at < len(data):
        size = sizes[counter.num_looks % len(sizes)]
        counter.feed(data[at : at + size])
        at += size
    assert counter.num_lists_and_objects == num_containers(value)
    assert counter.num_strings == num_strings(value)
    assert counter.num_values == 1 + num_containers(value) + num_commas(value)
    assert counter.num_fractions <= 1 + data.count(b"true") + data.count(b"false")
    assert counter.depth == 0


SIZE = 8 << 20
HOSTILE = {
    "zeros": (b'{"messages": [' + b"0," * (SIZE // 2), "1048576 values"),
    "lists": (b'{"prompt": [' + b"[5]," * (SIZE // 4), "32768 lists and objects"),
    "nested": (b'{"user": [' + b"[[]]," * (SIZE // 5), "32768 lists and objects"),
    "objects": (b'{"messages": [' + b"{}," * (SIZE // 3), "32768 lists and objects"),
    "strings": (b'{"stop": [' + b'"",' * (SIZE // 3), "65536 strings and names"),
    "names": (b"{" + b'"a":0,' * (SIZE // 6), "65536 strings and names"),
    "floats": (b'{"prompt": [' + b"1.2345678901234567e-300," * (SIZE // 24), "65536 numbers with"),
    "exponents": (b'{"prompt": [' + b"1e9," * (SIZE // 4), "65536 numbers with"),
    "digits": (b'{"prompt": [' + b"0.123456789012345678901234," * (SIZE // 26), "4096 numbers of"),
    "integers": (b"[" + (b"9" * 30 + b",") * (SIZE // 31), "4096 numbers of"),
    "deep": (b"[" * 1000, "128 levels"),
    "only ends": (b"]" * SIZE, "never opened"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_keep_a_parser_busy_is_refused_by_a_limit_that_is_named(name: str) -> None:
    data, limit = HOSTILE[name]
    counter = JsonCounter()
    with pytest.raises(BadRequest, match=limit):
        counter.feed(data)
    assert counter.num_looks <= -(-len(data) // (64 << 10))


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "' + b"," * SIZE + b'"}',
        b'{"prompt": "' + b'\\"[{' * (SIZE // 4) + b'"}',
        b'{"prompt": [' + b"true," * 100_000 + b"0]}",
        b'{"logprobs": [' + b"-0.00012345678901234567," * (json_counter.MAX_FRACTIONS - 1) + b"0]}",
        b'{"prompt": [' + b"12345," * (json_counter.MAX_VALUES - 3) + b"0]}",
    ],
    ids=["commas in text", "brackets in text", "literals", "log probabilities", "a million ids"],
)
def test_text_and_long_prompts_pass(data: bytes) -> None:
    JsonCounter().feed(data)
