"""Each expression lets exactly its own texts through."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.grammar.grammar_text import (
    GrammarText,
    any_token_but,
    either,
    json_schema,
    literal,
    optional,
    regex,
    repeat,
    sequence,
    token,
)
from decode_node.grammar.schemas.known_keywords import with_known_keywords
from decode_node.protocol.bodies.known_patterns import is_known_pattern
from tests.decode_node.grammar.matching import (
    CALL,
    END,
    END_CALL,
    END_IDS,
    accepts,
    allowed,
    allowed_after,
    ll_tokenizer,
    matcher,
    random_answer,
    spell,
)


def written(expression: str) -> str:
    return GrammarText().write(expression)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_literal_is_itself_and_nothing_else(text: str) -> None:
    grammar = written(literal(text))
    assert accepts(grammar, text)
    assert not accepts(grammar, text + "x")


def test_a_literal_is_its_text_and_no_regular_expression() -> None:
    assert not accepts(written(literal("a.c")), "abc")
    assert not accepts(written(literal("a")), "A")


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d{3}-\d{4}", "555-1234", "555-123"),
        (r"a/b\n", "a/b\n", "ab"),
        (r"(?i)yes|no", "YES", "maybe"),
        ("[^\n]+\n", "line\n", "line"),
        (r'"\\', '"\\', "x"),
    ],
)
def test_a_regular_expression_matches_the_whole_answer(
    pattern: str, right: str, wrong: str
) -> None:
    assert accepts(written(regex(pattern)), right)
    assert not accepts(written(regex(pattern)), wrong)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "größe": {"type": "integer"}},
    "required": ["name", "größe"],
    "additionalProperties": False,
}


def test_a_schema_takes_its_documents_in_its_order() -> None:
    grammar = written(json_schema(PERSON))
    assert accepts(grammar, '{"name":"a","größe":1}')
    assert accepts(grammar, '{ "name" : "a",\n\t"größe": 1 }')
    assert not accepts(grammar, '{"größe":1,"name":"a"}')
    assert not accepts(grammar, '{"name":"a"}')
    assert not accepts(grammar, '{"name":"a","größe":1,"x":1}')
    assert not accepts(grammar, '{"name":"a","größe":1} ')


@pytest.mark.parametrize("schema", [PERSON, {"type": "object"}, {"type": "array"}])
def test_white_space_in_documents_has_a_bound(schema: dict[str, object]) -> None:
    opening = "[" if schema["type"] == "array" else "{"
    grammar = written(json_schema(schema))
    blanks = {*spell(" "), *spell("\n"), *spell("\t")}
    assert {*spell(" "), *spell("\n")} <= set(allowed_after(grammar, opening))
    for run in (" ", "\n" + " " * 20, "\n" + "\t" * 10):
        assert not blanks & set(allowed_after(grammar, opening, run)), run


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"a","größe":1}',
        '{ "name": "a", "größe": 1 }',
        '{\n    "name": "a",\r\n\t"größe": 1\n}',
    ],
)
def test_json_is_taken_as_people_and_programs_write_it(text: str) -> None:
    assert accepts(written(json_schema(PERSON)), text)


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^(?:b|a)$"])
def test_patterns_that_list_names_are_properties(pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {pattern: {"maximum": 5}},
        "additionalProperties": False,
        "required": ["a"],
    }
    grammar = written(json_schema(schema))
    assert accepts(grammar, '{"a":5}')
    assert not accepts(grammar, '{"a":6}') and not accepts(grammar, '{"a":1.5}')
    assert accepts(grammar, '{"a":1,"b":1.5}') is ("b" in pattern)
    assert not accepts(grammar, '{"a":1,"c":1}')


@pytest.mark.parametrize("keyword", ["const", "minimum", "maximum", "multipleOf"])
def test_whole_numbers_that_are_not_exact_are_any_where_schemas_are_kept_as_far_as_possible(
    keyword: str,
) -> None:
    schema = {"type": "integer", keyword: 1234567890123456789}
    assert accepts(written(json_schema(schema, lenient=True)), "1234567890123456789")


@pytest.mark.parametrize(("schema", "right"), [(True, "[1, {}]"), ({}, "null")])
def test_a_schema_may_be_anything(schema: bool | dict[str, object], right: str) -> None:
    assert accepts(written(json_schema(schema)), right)


_COLOURS = {"enum": ["red", "blue", 3], "title": "Colour", "type": "string"}


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [
        ({"type": "string"}, ['{"":1}', "{}"], ['{"a":"x"}']),
        (True, ['{"a":1}'], ['{"a":true}']),
        (_COLOURS, ['{"red":1,"blue":2}', '{"blue":2}', "{}"], ['{"green":1}', '{"red":true}']),
        ({"$ref": "#/$defs/Colour"}, ['{"red":1}'], ['{"green":1}']),
        ({"const": "red"}, ['{"red":1}'], ['{"blue":1}']),
        ({"type": "string", "pattern": "^[a-z]+$"}, ['{"a":1,"bc":2}', "{}"], ['{"A":1}']),
    ],
)
def test_names_of_properties_can_be_said(names: Any, right: list[str], wrong: list[str]) -> None:
    """Zod and pydantic write records and dictionaries so."""
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    schema = {"$defs": {"Colour": _COLOURS}, **numbers, "propertyNames": names}
    grammar = written(json_schema(schema))
    assert [accepts(grammar, text) for text in right] == [True] * len(right)
    assert [accepts(grammar, text) for text in wrong] == [False] * len(wrong)
    assert schema["propertyNames"] == names, "the caller's own stays as it is"


@pytest.mark.parametrize(
    "names",
    [
        *({"minLength": 2}, {"type": "integer"}, {"$ref": "#/nowhere"}, {"$ref": "#/$defs/A"}),
        *({"enum": ["x" * 9000, *map(str, range(9))]}, {"pattern": 3}, {"enum": "x"}, False),
    ],
)
def test_names_that_cannot_be_said_stay_for_the_library_to_refuse(names: Any) -> None:
    value = {"type": "string", "enum": ["y" * 9000]}
    schema = {"propertyNames": names, "additionalProperties": value, "$defs": {"A": {"$ref": "#"}}}
    assert with_known_keywords(schema) == schema


def test_items_that_may_be_equal_are_any() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}
    assert accepts(written(json_schema(schema)), "[1,1]")
    assert with_known_keywords({**schema, "uniqueItems": True})["uniqueItems"]


def test_a_pattern_says_what_a_format_of_another_name_is() -> None:
    grammar = written(json_schema({"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"}))
    assert accepts(grammar, '"a1"') and not accepts(grammar, '"A"')
    kept = {"type": "string", "format": "date", "pattern": "^2"}
    assert with_known_keywords(kept) == kept
    for other in (
        {"format": "cuid2"},
        {"format": [], "pattern": ""},
        {"format": "x", "pattern": 1},
    ):
        assert with_known_keywords(other) == other


@pytest.mark.parametrize(
    ("pattern", "is_known"),
    [
        *(("(?=a)", False), ("a(?!b)", False), ("(?<=a)b", False), ("(?<!a)b", False)),
        *((r"(a)\1", False), (r"\bx", False), ("\n(?=a)", False), (r"(?<n>a)\k<n>", False)),
        *((r"\(?=a", True), (r"\\1", True), ("(?:a)(?<n>b)(?i)c", True), ("", True), ("\\", True)),
    ],
)
def test_patterns_are_known_by_their_syntax(pattern: str, is_known: bool) -> None:
    assert is_known_pattern(pattern) is is_known


def test_one_choice_may_begin_another() -> None:
    text = GrammarText()
    grammar = text.write(text.choice("answer", ["a", "ab", 'a"\n', "Å"]))
    assert all(accepts(grammar, right) for right in ["a", "ab", 'a"\n', "Å"])
    assert not accepts(grammar, "abb")


def test_tokens_are_meant_by_id() -> None:
    grammar = written(sequence(token(CALL), literal("x"), token(END_CALL)))
    assert accepts(grammar, CALL, "x", END_CALL)
    assert not accepts(grammar, "<tool_call>x</tool_call>")
    others = written(repeat(any_token_but([CALL, *END_IDS])))
    assert accepts(others, "<tool_call>", END_CALL)
    assert not accepts(others, CALL)
    assert set(allowed_after(others)) >= {END, END_CALL}


def test_expressions_bind_tightly_wherever_they_stand() -> None:
    grammar = written(
        sequence(
            either(literal("a"), literal("b")), repeat(sequence(literal("c"), literal("d")), 2, 3)
        )
    )
    assert accepts(grammar, "acdcd") and accepts(grammar, "bcdcdcd")
    assert not any(accepts(grammar, wrong) for wrong in ["a", "bcd", "acdcdcdcd", "accdd"])
    assert accepts(written(sequence(optional(literal("x")), literal("y"))), "y")
    assert accepts(written(repeat(literal("x"), 1)), "xxx")


def test_text_goes_up_to_the_first_marker() -> None:
    text = GrammarText()
    grammar = text.write(sequence(text.until("note", "[/END]"), literal("x")))
    assert accepts(grammar, "some [text\n [/END]x")
    assert not accepts(grammar, "some [/END] more [/END]x")


def test_another_grammar_keeps_its_names_to_itself() -> None:
    text = GrammarText()
    own = text.rule("number", literal("no "))
    other = text.grammar("theirs", "start: number\nnumber: /[0-9]+/\n")
    grammar = text.write(sequence(own, other))
    assert accepts(grammar, "no 12")
    assert not accepts(grammar, "no no ")


def test_names_that_are_taken_get_a_number() -> None:
    text = GrammarText()
    rules = [text.rule("call", literal(letter)) for letter in "ab"]
    rules.append(text.choice("call", ["c"]))
    assert len({rule.lower() for rule in rules}) == 3
    assert accepts(text.write(sequence(*rules)), "abc")


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "expression",
    [
        regex("(a{1000}){1000}"),
        json_schema({"const": "a" * 60_000}),
        repeat(repeat(literal("a"), 1000, 1000), 1000, 1000),
    ],
)
def test_a_text_that_must_come_costs_a_step_nothing_however_long_it_is(expression: str) -> None:
    """The library spelled all of it in each step: up to 3 s, while all other rows waited. Of most
    steps, for a busy processor makes one dear now and then."""
    made = matcher(written(expression))
    costs = []
    for _ in range(8):
        started = time.thread_time()
        choices = allowed(made)
        costs.append(time.thread_time() - started)
        assert made.consume_token(choices[-1])
    assert statistics.median(costs) < 0.02, costs


@pytest.mark.parametrize("seed", range(5))
def test_random_answers_are_documents(seed: int) -> None:
    ids, is_complete = random_answer(written(json_schema(PERSON)), seed, 4000)
    assert is_complete
    assert set(json.loads(ll_tokenizer().decode_bytes(ids))) == {"name", "größe"}


def test_until_takes_markers_of_any_characters() -> None:
    for marker in ("</｜tool▁end｜>", "a_b-c", r"\d[x]^$.|?*+(){}/#&~!\"'"):
        text = GrammarText()
        grammar = text.write(sequence(text.until("free", marker), literal("end")))
        assert accepts(grammar, f"é {marker}end")
        assert not accepts(grammar, "é end")


def test_text_without_a_marker_comes_behind_text_with_it() -> None:
    text = GrammarText()
    part = sequence(text.until("before", "<tool>"), literal("x"))
    grammar = text.write(sequence(optional(part), text.without("text", "<tool>")))
    for answer in ("", "a <tool", "a <tool>x", "<tool>x b <tool"):
        assert accepts(grammar, answer)
    for answer in ("a <tool>", "a <tool>x <tool>x", "<tool>y"):
        assert not accepts(grammar, answer)
