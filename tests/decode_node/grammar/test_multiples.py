"""Numbers that a schema wants to be multiples are, or the schema is refused before any work."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.grammar.grammar_text import GrammarText, json_schema
from decode_node.grammar.schemas.known_keywords import with_known_keywords
from decode_node.grammar.schemas.schema_checks import check_schema
from edge.http.errors import BadRequest
from engine.grammar.tokenizer import parser_limits
from tests.decode_node.grammar.matching import accepts, allowed, ll_tokenizer

LARGE = 10**12


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 7919, "minimum": 0, "maximum": LARGE},
        {"type": "integer", "multipleOf": 7919, "maximum": LARGE},
        {"type": "number", "multipleOf": 2500.5, "exclusiveMaximum": LARGE},
        {"type": "integer", "multipleOf": 0.9999, "maximum": LARGE},
        {"type": "integer", "multipleOf": 3600, "minimum": 0, "maximum": 512 * 3600},
        {"multipleOf": 3600, "minimum": 0, "maximum": 86400},
        {"type": ["integer", "string"], "multipleOf": 3600, "minimum": 0, "maximum": 86400},
        {"type": "integer", "allOf": [{"multipleOf": 7919}, {"maximum": LARGE}]},
        {"type": "integer", "multipleOf": 99, "allOf": [{"multipleOf": 101}], "maximum": LARGE},
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"x\.properties\.a: multipleOf of more than 2000"):
        check_schema({"properties": {"a": schema}}, "x")


def test_a_range_without_a_multiple_is_refused() -> None:
    schema = {"type": "integer", "multipleOf": 3600, "minimum": 1, "maximum": 3599}
    with pytest.raises(BadRequest, match="no number between minimum and maximum"):
        check_schema(schema, "x")


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {"type": "integer", "multipleOf": 3600, "minimum": 0, "maximum": 10800},
            [0, 3600, 7200, 10800],
        ),
        (
            {
                "type": "integer",
                "multipleOf": 3600,
                "exclusiveMinimum": 0,
                "exclusiveMaximum": 7200,
            },
            [3600],
        ),
        (
            {"type": ["number", "null"], "multipleOf": 2500.1, "minimum": -6000, "maximum": 7501},
            [-5000.2, -2500.1, 0, 2500.1, 5000.2, 7500.3, None],
        ),
    ],
)
def test_few_numbers_are_listed(schema: dict[str, Any], values: list[float | None]) -> None:
    check_schema({"items": {"title": "t", **schema}}, "x")
    [listed] = [with_known_keywords({"items": {"title": "t", **schema}})["items"]]
    assert listed == {"title": "t", "type": schema["type"], "enum": values}
    for value in values:
        assert accepts(_grammar(schema), json.dumps(value))
    assert not accepts(_grammar(schema), "3601")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 5000, "minimum": 0},
        {"type": "integer", "enum": [5000, 10000], "multipleOf": 5000, "maximum": LARGE},
        {"type": "integer", "multipleOf": True, "maximum": LARGE},
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": LARGE},
    ],
)
def test_others_are_left_as_they_are(schema: dict[str, Any]) -> None:
    check_schema(schema, "x")
    assert with_known_keywords(schema) == schema


@pytest.mark.parametrize("inner", [{"multipleOf": 7919}, {"allOf": [{"multipleOf": 7919}]}])
def test_tools_that_are_not_strict_lose_the_keyword(inner: dict[str, Any]) -> None:
    schema = {"type": "integer", **inner, "minimum": 0, "maximum": LARGE}
    grammar = GrammarText().write(json_schema(schema, lenient=True))
    assert accepts(grammar, "7920")


@settings(max_examples=12, deadline=None)
@given(
    multiple=st.integers(1900, 2000),
    seed=st.integers(0, 99),
    low=st.sampled_from([None, -LARGE, 0]),
)
def test_the_largest_multiples_are_followed_to_their_ends(
    multiple: int, seed: int, low: int | None
) -> None:
    schema = {"type": "integer", "multipleOf": multiple, "maximum": LARGE}
    if low is not None:
        schema["minimum"] = low
    check_schema(schema, "x")
    text = _walk(_grammar(schema), random.Random(seed))
    assert int(text) % multiple == 0 and int(text) <= LARGE
    assert low is None or low <= int(text)


def _grammar(schema: dict[str, Any]) -> str:
    return GrammarText().write(json_schema(schema))


def _walk(grammar: str, draw: random.Random) -> str:
    """Writes a number digit by digit, of those that are allowed, within the limits of workers."""
    tokenizer = ll_tokenizer()
    matcher = llguidance.LLMatcher(tokenizer, grammar, limits=parser_limits(), log_level=0)
    text = ""
    while len(text) < 40:
        pieces = {token: tokenizer.decode_str([token]) for token in allowed(matcher)}
        assert pieces and not matcher.is_error(), matcher.get_error()
        digits = [token for token, piece in pieces.items() if piece.strip("-").isdigit()]
        if not digits:
            break
        token = draw.choice(digits)
        assert matcher.consume_token(token)
        text += pieces[token]
    return text
