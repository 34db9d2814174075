"""Documents that end by themselves are valid: over public schemas, by an independent validator."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from decode_node.grammar.grammar_text import GrammarText, json_schema
from tests.decode_node.grammar.conformance import EXPECTED, judged, matchers, random_document
from tests.decode_node.grammar.matching import accepts
from tests.decode_node.grammar.public_schemas import public_schemas
from tests.engine.worker.grammar_requests import (
    EOS,
    grammar_config,
    make_request,
    text_of,
    write_checkpoint,
)
from tests.engine.worker.one_engine import OneEngine

PYTHON_CANNOT = re.compile(r"\\p\{")
"""Regular expressions that JSON schema has, and the validator's have not."""


def faults(schema: Any, document: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        kind = jsonschema.validators.validator_for(
            schema if isinstance(schema, dict) else {}, default=jsonschema.Draft202012Validator
        )
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        return [error.message for error in validator.iter_errors(document)]


def test_there_are_enough() -> None:
    assert len(public_schemas()) > 900 and len(matchers()) >= 500


def test_what_is_refused_is_what_is_known() -> None:
    """Every schema that cannot be kept, every valid document that cannot be written, and every
    invalid one that can: the list says so, and nothing else is."""
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(judged()))
    assert found == expected
    assert len(found["accepted_though_invalid"]) <= 1, "U+FEFF is white space to ECMA 262 alone"
    assert all(found["refused"].values()), "a refusal says why"


def test_every_random_document_that_ends_is_valid() -> None:
    ended = 0
    for number, matcher in matchers().items():
        schema = public_schemas()[number].schema
        if PYTHON_CANNOT.search(json.dumps(schema)):
            continue
        text = random_document(matcher, seed=number)
        if text is not None:
            ended += 1
            assert not faults(schema, json.loads(text)), (number, text)
    assert ended >= 450


SAMPLE = range(0, 460, 7)


def test_documents_of_an_engine_with_random_weights_are_valid(tmp_path: Path) -> None:
    """The same through scheduler, worker and sampler, many at a time."""
    write_checkpoint(tmp_path)
    engine = OneEngine(grammar_config(tmp_path), depth=2)
    wanted = [number for number in SAMPLE if number in matchers()]
    assert len(wanted) >= 20
    for number in wanted:
        grammar = GrammarText().write(json_schema(public_schemas()[number].schema))
        engine.add(make_request(str(number), grammar, seed=number, max_tokens=60))
    engine.finish()
    valid = 0
    for number in wanted:
        assert engine.ended[str(number)] in ("stop", "length"), engine.errors[str(number)]
        tokens = engine.tokens[str(number)]
        if tokens[-1] in EOS:
            assert not faults(public_schemas()[number].schema, json.loads(text_of(tokens)))
            valid += 1
    assert valid >= len(wanted) // 2


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z"]),
        ("byte", ["", "YQ==", "YWI=", "YWJj"], ["YQ", "YQ=", "Y", "YW J"]),
        ("password", ["", "any text"], []),
        ("binary", ["x"], []),
        ("hostname", ["a.example-1.org", "x" * 63], ["-a", "a-.b", "a..b", "x" * 64, "xn--x"]),
    ],
)
def test_formats_are_kept_to_the_letter(form: str, right: list[str], wrong: list[str]) -> None:

    for schema in ({"type": "string", "format": form}, {"items": {"format": form, "pattern": ""}}):
        grammar = GrammarText().write(json_schema(schema))
        shown = (lambda text: [text]) if "items" in schema else (lambda text: text)
        assert [t for t in right if not accepts(grammar, json.dumps(shown(t)))] == []
        assert [t for t in wrong if accepts(grammar, json.dumps(shown(t)))] == []


def test_names_that_look_like_keywords_are_names() -> None:
    schema = {"type": "object", "properties": {"format": {"const": "date"}}, "required": ["format"]}

    assert accepts(GrammarText().write(json_schema(schema)), '{"format": "date"}')
