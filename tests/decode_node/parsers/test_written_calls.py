"""Any calls, as each family writes them: read back as they were written, alike in every cut.

Values quote what formats consist of, as text. Quoted as tokens, a value may end early in formats
that have no escapes, but a stream and the whole answer are still the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.parsers.families.families import CALL_FAMILIES
from decode_node.protocol.chat.tools import Tool
from tests.decode_node.parsers.parsing import parse, random_cuts
from tests.decode_node.parsers.test_calls import parsers_of, tokens_of
from tests.decode_node.parsers.writers import WRITERS, plain, stream

Json = dict[str, Any]

_STRINGS = {"type": "array", "items": {"type": "string"}}
_NODE = {
    "type": "object",
    "properties": {
        "label": {"type": "string"},
        "size": {"type": "number"},
        "on": {"type": "boolean"},
        "tags": _STRINGS,
        "nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        "in": {"$ref": "#/$defs/node"},
    },
}
TOOLS = [
    Tool(
        "fetch_it",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "more": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "flag": {"type": "boolean"},
                "tags": _STRINGS,
                "node": {"$ref": "#/$defs/node"},
            },
            "$defs": {"node": _NODE},
        },
        strict=False,
        raw={},
    ),
    Tool("now", {"type": "object", "properties": {}}, strict=False, raw={}),
]
_FRAGMENTS = [
    *('"', "'", "\\", "\\n", "\n", "\n\n", " ", "\t", "\r\n", "{", "}", "[", "]", "(", ")", "<"),
    *(">", "</", "/>", "&", "&quot;", "=", ":", ",", "null", "None", "true", "0", "-", "é", "日本"),
    *("👩‍👩‍👧", "\u2028", "\x00", "\x7f", "\ufeff", "\ufffd", "%s", "```json", "$", '"""', "'''"),
    *("\\u0041", "\\ud83d", "<think>", "</think>", "fetch_it", "now", "text"),
]
_NUMBERS = st.one_of(
    st.sampled_from([0, -1, 2**53 + 1, 10**30, -0.0, 1e22, 1.5, 5e-324, 1.7976931348623157e308]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)


def texts(family: str) -> st.SearchStrategy[str]:
    """Draws texts that quote the family's markers, whole and broken."""
    markers = list(tokens_of(family))
    fragments = [*_FRAGMENTS, *markers, *(marker[:-1] for marker in markers)]
    some = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=4)
    return st.lists(st.one_of(st.sampled_from(fragments), some), max_size=6).map("".join)


@cache
def calls(family: str) -> st.SearchStrategy[list[tuple[str, Json]]]:
    text = texts(family)
    leaves = {
        "label": text,
        "size": _NUMBERS,
        "on": st.booleans(),
        "tags": st.lists(text, max_size=3),
    }
    node = st.recursive(
        st.fixed_dictionaries({}, optional=leaves),
        lambda inner: st.fixed_dictionaries(
            {}, optional={**leaves, "nodes": st.lists(inner, max_size=2), "in": inner}
        ),
        max_leaves=4,
    )
    values = {
        "text": text,
        "more": text,
        "count": st.one_of(st.integers(), st.just(10**30)),
        "ratio": _NUMBERS,
        "flag": st.booleans(),
        "tags": st.lists(text, max_size=3),
        "node": node,
    }
    fetch = st.tuples(st.just("fetch_it"), st.fixed_dictionaries({}, optional=values))
    now = st.tuples(st.just("now"), st.just(dict[str, Any]()))
    return st.lists(st.one_of(fetch, now), min_size=1, max_size=3)


def test_every_family_is_written() -> None:
    assert set(WRITERS) == {family.names[0] for family in CALL_FAMILIES}


def read_in_cuts(family: str, text: str, *, as_tokens: bool, seed: int) -> Any:
    """Reads a text whole, one token at a time and in random parts, and checks that all agree."""
    added = tokens_of(family) if as_tokens else {}
    made, tokens = parsers_of(family, added), stream(text, added)
    whole = parse(made.parser(TOOLS), [tokens])
    for cut in ([[token] for token in tokens], random_cuts(tokens, seed)):
        assert parse(made.parser(TOOLS), cut) == whole
    return whole


def loaded(answer: Any) -> Sequence[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_calls_are_read_as_they_are_written(family: str, data: st.DataObject) -> None:
    written = data.draw(calls(family))
    text, seed = WRITERS[family](written), data.draw(st.integers(0, 99))
    answer = read_in_cuts(family, text, as_tokens=True, seed=seed)
    assert loaded(answer) == written
    assert not answer.content.strip() and not answer.incomplete


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_quoted_markers_are_read_alike_in_every_cut(family: str, data: st.DataObject) -> None:
    text, seed = WRITERS[family](data.draw(calls(family))), data.draw(st.integers(0, 99))
    read_in_cuts(family, plain(text), as_tokens=data.draw(st.booleans()), seed=seed)
