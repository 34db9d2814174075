"""Schemas, expressions and grammars of clients: refused in a sentence, or kept. Whatever an
accepted schema lets through is valid to `jsonschema`."""

from __future__ import annotations

import asyncio
import atexit
import json
import tempfile
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import strategies as st

from decode_node.grammar.checks.grammar_checker import GrammarChecker
from decode_node.grammar.grammar_text import GrammarText
from decode_node.grammar.structured_output import express, find_constraint
from decode_node.protocol.bodies.parse_body import validate
from decode_node.protocol.chat.chat import ChatCompletionRequest
from edge.http.errors import BadRequest
from tests.decode_node.grammar.conformance import random_document
from tests.decode_node.grammar.matching import END_IDS, backend, ll_tokenizer, matcher
from tests.engine.tiny_model import tiny_model
from tests.fuzz.damage import WORDS, altered, damaged, json_bytes
from tests.fuzz.target import Fault, Target, judged

_NAMES = st.sampled_from(["a", "b", "é", "$ref", ""])
_BOUNDS = st.sampled_from([0, 1, 2, 5, -3, 2.5, 10**6])
_LEAVES = st.one_of(
    st.sampled_from(
        [True, {}, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}]
    ),
    st.fixed_dictionaries({"const": st.none() | st.booleans() | st.integers(-9, 9) | WORDS}),
    st.fixed_dictionaries({"enum": st.lists(st.integers(-9, 9) | WORDS, min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": _BOUNDS,
            "maximum": _BOUNDS,
            "exclusiveMinimum": _BOUNDS,
            "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(0, 5),
            "pattern": st.sampled_from(["^a+$", "b", "^(x|y){1,3}$", "[", "(?=a)", ""]),
            "format": st.sampled_from(["date", "uuid", "ipv4", "email", "nothing"]),
        },
    ),
)


def _above(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(0, 3),
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "uniqueItems": st.booleans(),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(_NAMES, inner, max_size=3)},
            optional={
                "required": st.lists(_NAMES, max_size=2, unique=True),
                "additionalProperties": st.just(False) | inner,
                "minProperties": st.integers(0, 2),
                "maxProperties": st.integers(0, 3),
            },
        ),
        st.fixed_dictionaries(
            {},
            optional={
                "anyOf": st.lists(inner, min_size=1, max_size=2),
                "oneOf": st.lists(inner, min_size=1, max_size=2),
                "allOf": st.lists(inner, min_size=1, max_size=2),
                "not": inner,
                "$ref": st.sampled_from(["#", "#/$defs/x", "http://x/"]),
                "$defs": st.fixed_dictionaries({"x": inner}),
            },
        ),
    )


_SCHEMAS = st.recursive(_LEAVES, _above, max_leaves=6)


class _Checker:
    """The process that judges grammars, and an event loop to ask it on."""

    def __init__(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="tandem-tokenizer-")
        atexit.register(folder.cleanup)
        backend().save(str(Path(folder.name) / "tokenizer.json"))
        size = ll_tokenizer().vocab_size
        model = tiny_model(path=folder.name, vocab_size=size, eos_token_ids=END_IDS)
        self._checker = GrammarChecker(model)
        atexit.register(self._checker.close)
        self._loop = asyncio.new_event_loop()

    def accepted(self, fields: dict[str, Any]) -> str:
        """Returns the grammar of a request. Raises `BadRequest`."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        constraint = find_constraint(validate(body, ChatCompletionRequest))
        if constraint is None:
            return ""
        text = GrammarText()
        grammar = text.write(express(constraint, text))
        return self._loop.run_until_complete(self._checker.check(grammar, constraint.param))


@cache
def _checker() -> _Checker:
    return _Checker()


def _check_schema(data: bytes) -> None:
    try:
        schema = json.loads(data)
    except (ValueError, RecursionError):
        return
    grammar = judged(lambda: _checker().accepted({"guided_json": schema}), BadRequest)
    if not grammar:
        return
    made = matcher(grammar)
    for seed in range(2):
        answer = random_document(made, seed, most=120)
        if answer is not None and (fault := _fault(schema, json.loads(answer))):
            raise Fault(f"{answer[:300]} follows the grammar: {fault}")


def _fault(schema: Any, document: Any) -> str:
    """Returns what the reference has against a document; "" where it cannot judge."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            jsonschema.Draft202012Validator.check_schema(schema)
            validator = jsonschema.Draft202012Validator(schema)
            return next((error.message for error in validator.iter_errors(document)), "")
    except (jsonschema.SchemaError, RecursionError):
        return ""
    except Exception as error:  # unresolvable references, expressions that are none
        if type(error).__name__ in ("_WrappedReferencingError", "error", "PatternError"):
            return ""
        raise


_LARK = st.sampled_from(
    [
        b'start: "a" b+\nb: /[0-9]{1,3}/\n',
        b'start: A | "x"\nA: /a+/ & /[ab]*/\n',
        b'root ::= "a" | b*\nb ::= [0-9]+ "x"\n',
        b"%llguidance {}\nstart: /a/\n",
        b"start: <[5]> /x/\n",
    ]
)
_PATTERNS = st.sampled_from([b"[a-f]{2,9}(-[0-9]{2})?", b"(a|b)*c", rb"\p{L}+\d", b"(?i:x)y{3}"])


def _check_text(field: str, data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    grammar = judged(lambda: _checker().accepted({field: text}), BadRequest)
    if grammar:
        random_document(matcher(grammar), 0, most=20)


_TARGET = partial(Target, max_s=2.0)

TARGETS = [
    _TARGET(
        name="schemas",
        check=_check_schema,
        examples=150,
        inputs=st.one_of(_SCHEMAS, _SCHEMAS.flatmap(lambda one: altered(one, 1))).map(json_bytes),
    ),
    _TARGET(
        name="grammars",
        inputs=damaged(_LARK, 3),
        check=partial(_check_text, "guided_grammar"),
        examples=100,
    ),
    _TARGET(
        name="expressions",
        inputs=damaged(_PATTERNS, 3),
        check=partial(_check_text, "guided_regex"),
        examples=100,
    ),
]
