"""Each field of a request means a grammar; these are the texts that it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decode_node.grammar.checks.library_errors import in_plain_words
from decode_node.grammar.grammar_text import GrammarText
from decode_node.grammar.structured_output import express, find_constraint
from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.bodies.structured_output import StructuredFields
from edge.http.errors import BadRequest
from tests.decode_node.grammar.conformance import compiled
from tests.decode_node.grammar.hostile import nested_objects
from tests.decode_node.grammar.matching import CALL, END_CALL, SPECIAL, accepts, id_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def read(body: dict[str, Any]) -> StructuredFields:
    return parse_body(json.dumps(body).encode(), StructuredFields)


def grammar_of(body: dict[str, Any]) -> str:
    constraint = find_constraint(read(body))
    assert constraint is not None
    text = GrammarText({special: id_of(special) for special in SPECIAL})
    return text.write(express(constraint, text))


def refused(body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        grammar_of(body)
    return caught.value


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    form = {"name": "answer", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


@pytest.mark.parametrize(
    "body",
    [
        response_format(SCHEMA),
        response_format(SCHEMA, strict=True),
        response_format(SCHEMA, strict=False, description="an answer"),
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "outlines"},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
def test_a_schema_by_all_its_names(body: dict[str, Any]) -> None:
    grammar = grammar_of(body)
    assert accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, '{"a": "1"}') and not accepts(grammar, '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_object_and_only_objects(body: dict[str, Any]) -> None:
    grammar = grammar_of(body)
    assert accepts(grammar, '{"a": [1, {"b": null}]}') and accepts(grammar, "{}")
    assert not accepts(grammar, "[]") and not accepts(grammar, "1")


@pytest.mark.parametrize("name", ["structured_outputs", "guided_regex", "regex"])
def test_a_regular_expression_by_all_its_names(name: str) -> None:
    pattern = r"^\d{2}:\d{2}$"
    value = {"regex": pattern} if name == "structured_outputs" else pattern
    grammar = grammar_of({name: value})
    assert accepts(grammar, "12:30")
    assert not accepts(grammar, "12:3") and not accepts(grammar, "^12:30$")


@pytest.mark.parametrize("name", ["structured_outputs", "guided_choice"])
def test_a_choice_by_all_its_names(name: str) -> None:
    choice = ["yes", "no", "no way"]
    grammar = grammar_of({name: {"choice": choice} if name == "structured_outputs" else choice})
    assert all(accepts(grammar, text) for text in choice)
    assert not accepts(grammar, "maybe") and not accepts(grammar, "no w")


@pytest.mark.parametrize("name", ["structured_outputs", "guided_grammar", "ebnf"])
def test_lark_by_all_its_names(name: str) -> None:
    lark = 'start: "a"+ <tool_call> x\nx: "<tool_call>" // not <tool_call> but its text\n'
    grammar = grammar_of({name: {"grammar": lark} if name == "structured_outputs" else lark})
    assert accepts(grammar, "aa", CALL, "<tool_call>")
    assert not accepts(grammar, "aa", CALL, CALL)


def test_white_space_as_asked() -> None:
    none = grammar_of({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}})
    assert accepts(none, '{"a":1}') and not accepts(none, '{"a": 1}')
    for body in (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
    ):
        grammar = grammar_of(body)
        assert accepts(grammar, '{"a": 1}') and not accepts(grammar, '{"a":\n1}')


def test_additional_properties_may_be_turned_off() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    body = {"json": schema, "disable_additional_properties": True}
    grammar = grammar_of({"structured_outputs": body})
    assert accepts(grammar, '{"a":{"b":1}}')
    assert not accepts(grammar, '{"c":1}') and not accepts(grammar, '{"a":{"c":1}}')


def test_text_is_no_constraint() -> None:
    assert find_constraint(read({"response_format": {"type": "text"}})) is None
    assert find_constraint(read({})) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**response_format(SCHEMA), "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"], "ebnf": "b"}, "ebnf"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_grammar": "start: " + "x" * 70_000}, "guided_grammar"),
        ({"guided_choice": ["a" * 70_000]}, "guided_choice"),
        (response_format({"enum": ["a" * 70_000]}), "response_format.json_schema.schema"),
        (response_format(nested_objects(40)), "response_format.json_schema.schema"),
        (response_format({"x-guidance": {}}), "response_format.json_schema.schema"),
        (response_format({"items": {"$ref": "http://h/a"}}), "response_format.json_schema.schema"),
        (
            {"structural_tag": {"format": {"type": "regex", "pattern": "a" * 70_000}}},
            "structural_tag",
        ),
        (response_format(False), "response_format.json_schema.schema"),
        (response_format(3), "response_format.json_schema.schema"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refused(body).param == param


def test_a_depth_within_the_limit_is_fine() -> None:
    assert accepts(grammar_of(response_format(nested_objects(31))), '{"a":' * 31 + '"x"' + "}" * 31)


def tag(name: str, schema: Any = True) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"begin": f"<fn={name}>", "content": content, "end": "</fn>"}


LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=f>", "schema": SCHEMA, "end": "</fn>"},
        {"begin": "<fn=g>", "schema": {"type": "integer"}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<fn="],
        "tags": [tag("f", SCHEMA), tag("g", {"type": "integer"})],
    },
}


@pytest.mark.parametrize("shape", [LEGACY, TAGS])
@pytest.mark.parametrize("place", ["response_format", "structured_outputs", "structural_tag"])
def test_structural_tags_by_all_their_names(shape: dict[str, Any], place: str) -> None:
    value: Any = shape
    if place == "structured_outputs":
        value = {"structural_tag": json.dumps(shape)}
    grammar = grammar_of({place: value})
    assert accepts(grammar, "no call at all")
    assert accepts(grammar, 'so <fn=f>{"a": 1}</fn> and\n<fn=g>12</fn><fn=g>3</fn>.')
    assert not accepts(grammar, 'so <fn=f>{"a": "1"}</fn>')
    assert not accepts(grammar, "so <fn=h>1</fn>")
    assert not accepts(grammar, "so <fn=g>1")


def test_a_trigger_may_be_a_special_token() -> None:
    named = {"begin": '<tool_call>{"name": "f", "arguments": ', "end": "}</tool_call>"}
    form = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [{**named, "content": {"type": "json_schema", "json_schema": SCHEMA}}],
        "at_least_one": True,
    }
    grammar = grammar_of({"structural_tag": {"format": form}})
    call = [CALL, '{"name": "f", "arguments": {"a": 1}}', END_CALL]
    assert accepts(grammar, "I call it:", *call, "and", *call)
    assert not accepts(grammar, "I call nothing")
    assert not accepts(grammar, CALL, "{}", END_CALL)


FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": "abc"}, ["abc"], ["ab", "x"]),
    ({"type": "regex", "pattern": "[ab]+"}, ["abba"], ["c"]),
    ({"type": "grammar", "grammar": 'start: "x"+'}, ["xx"], ["y"]),
    ({"type": "any_text"}, ["", "any\ntext"], []),
    ({"type": "json_schema", "json_schema": {"type": "boolean"}}, ["true"], ["1"]),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "or", "elements": [{"type": "regex", "pattern": c} for c in "bc"]},
                {"type": "any_text"},
            ],
        },
        ["ab", "acxyz"],
        ["ad", "b"],
    ),
    ({"type": "optional", "content": {"type": "const_string", "value": "a"}}, ["", "a"], ["aa"]),
    ({"type": "star", "content": {"type": "const_string", "value": "a"}}, ["", "aaa"], ["b"]),
    ({"type": "plus", "content": {"type": "const_string", "value": "a"}}, ["a", "aaa"], ["", "b"]),
    (
        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "a"}},
        ["a", "aa"],
        ["", "aaa"],
    ),
    (tag("f", {"type": "null"}) | {"type": "tag"}, ["<fn=f>null</fn>"], ["<fn=f>1</fn>", "null"]),
    (
        {"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": [")", "]"]},
        ["(a[b)", "(x]"],
        ["(a", "(a)b)"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("f", {"type": "integer"})],
            "separator": ", ",
            "at_least_one": True,
        },
        ["<fn=f>1</fn>", "<fn=f>1</fn>, <fn=f>2</fn>"],
        ["", "<fn=f>1</fn><fn=f>2</fn>"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<fn="],
            "tags": [tag("f", {"type": "integer"})],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["a <fn=f>1</fn>"],
        ["a", "<fn=f>1</fn> b"],
    ),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMATS)
def test_formats_of_structural_tags(
    form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar = grammar_of({"structural_tag": {"type": "structural_tag", "format": form}})
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "qwen_xml_parameter is not supported"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes of a format is not supported"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}, "last"),
        ({"type": "sequence", "elements": []}, "needs elements"),
        ({"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}, "not empty"),
        ({"type": "token", "token": "<nobody>"}, "does not have"),
        ({"type": "triggered_tags", "triggers": ["<x"], "tags": [tag("f")]}, "trigger"),
        ({"type": "repeat", "min": 3, "max": 1, "content": {}}, "max below"),
        ({"type": "json_schema", "json_schema": {"x-guidance": {}}}, "x-guidance"),
        ("text", "without a type"),
    ],
)
def test_formats_that_are_not_known_are_named(form: Any, said: str) -> None:
    error = refused({"structural_tag": {"format": form}})
    assert said in error.message and error.param == "structural_tag"


def test_formats_cannot_be_nested_without_end() -> None:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(90):
        form = {"type": "optional", "content": form}
    assert "nested" in refused({"structural_tag": {"format": form}}).message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 1234567890123456789}, r": const"),
        ({"properties": {"a": {"enum": [[1, 2**53 + 1]]}}}, r"\.properties\.a: enum"),
        ({"items": {"type": "integer", "maximum": -(2**63)}}, r"\.items: maximum"),
    ],
)
def test_whole_numbers_beyond_doubles_are_refused_by_name(schema: Any, place: str) -> None:
    with pytest.raises(BadRequest, match=rf"guided_json{place} has a whole number beyond 2\^53"):
        grammar_of({"guided_json": schema})
    assert grammar_of({"guided_json": {"const": 2**53, "enum": [True, "x", 1e300]}})


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({"minProperties": 2}, False),
        ({"minProperties": 2, "additionalProperties": {"type": "null"}}, False),
        (
            {"minProperties": 2, "additionalProperties": False, "patternProperties": {"x": True}},
            False,
        ),
        ({"minProperties": 3, "properties": {"a": {}}, "required": ["a"]}, False),
        ({"minProperties": 1}, True),
        ({"minProperties": 2, "properties": {"a": {}}, "required": ["a"]}, True),
        (
            {"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
            True,
        ),
    ],
)
def test_counts_of_names_that_an_answer_may_repeat_are_refused(
    fields: dict[str, Any], is_kept: bool
) -> None:
    """A grammar cannot know which names an answer has used, and read as JSON two are one."""
    body = {"guided_json": {"type": "object", **fields}}
    if is_kept:
        grammar_of(body)
    else:
        error = refused(body)
        assert error.param == "guided_json" and "minProperties counts" in error.message


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "frog"}}}, "frog is no type of a JSON schema"),
        ({"properties": {"a": 5}}, "a schema within it is neither an object nor a boolean"),
        ({"$ref": "#/none"}, "a $ref names /none, which is not in the schema"),
        ({"type": "string", "minLength": -1}, "minLength: positive integer expected, not -1"),
        ({"enum": []}, "no document follows it: enum or anyOf has no option"),
        (
            {"type": "array", "minItems": 5, "maxItems": 2},
            "no document follows it: minItems (5) is greater than maxItems (2)",
        ),
        ({"type": "integer", "minimum": 1e30}, "minimum or maximum is too large"),
    ],
)
def test_what_the_library_says_of_a_schema_is_said_in_our_words(schema: Any, words: str) -> None:
    refused = compiled(schema)
    assert isinstance(refused, str) and words in refused


@pytest.mark.parametrize("said", ["panic: at `\x1b[2J`", "3(4): \x07 is unknown"])
def test_what_the_library_says_is_made_printable(said: str) -> None:
    assert in_plain_words(said).isprintable() and "panic" not in in_plain_words(said)
