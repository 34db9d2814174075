"""Schemas that clients send as other servers take them hold answers as they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.decode_node.grammar.test_structured_output import accepts, grammar_of, response_format

OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OPTIONAL, ['{"a": 1}', '{"a": 1, "b": "x"}'], ['{"b": "x"}', '{"a": 1, "c": 1}', "{}"]),
        ({"type": "array", "items": OPTIONAL}, ['[{"a": 1}]', "[]"], ['[{"b": "x"}]', '{"a": 1}']),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPTIONAL}}, ['{"a": 1}'], ['{"b": "x"}']),
        ({"anyOf": [OPTIONAL, {"type": "null"}]}, ["null", '{"a": 1}'], ["1"]),
        ({k: OPTIONAL[k] for k in ("type", "properties")}, ["{}", '{"c": 1}'], ['{"a": "x"}']),
    ],
)
def test_strict_leaves_a_schema_as_it_is_written(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """OpenAI refuses these; clients of vLLM and SGLang, which keep them, send them."""
    grammar = grammar_of(response_format(schema, strict=True))
    assert grammar == grammar_of(response_format(schema))
    assert all(accepts(grammar, text) for text in good)
    assert not any(accepts(grammar, text) for text in bad)


GRIPTAPE: dict[str, Any] = {
    "properties": {
        "city": {"title": "City", "type": "string"},
        "temp": {
            "anyOf": [{"type": "number"}, {"type": "null"}], "default": None, "title": "Temp",
        },
    },
    "required": ["city"],
    "title": "W",
    "type": "object",
    "$id": "Output Format",
    "$schema": "http://json-schema.org/draft-07/schema#",
    "additionalProperties": False,
}  # fmt: skip
"""The schema that griptape 1.13.0 sends for a class, as it was recorded."""


@pytest.mark.parametrize(
    "schema",
    [
        GRIPTAPE,
        {**GRIPTAPE, "$id": "https://example.com/w", "properties": {"city": {"$id": "a b"}}},
        {**GRIPTAPE, "properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"$id": "c"}}},
    ],
)
def test_names_of_schemas_to_which_nothing_refers_may_be_any(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    grammar = grammar_of(response_format(schema, strict=True))
    assert accepts(grammar, '{"city": "Bonn"}') and not accepts(grammar, '{"temp": 1}')
    assert json.dumps(schema) == before
