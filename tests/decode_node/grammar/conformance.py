"""Judges the public schemas: which are accepted, and which of their documents can be written.

`expected_answers.json` keeps what is refused, to be read when it changes. After an update of the
library:

    python -m tests.decode_node.grammar.conformance
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from decode_node.grammar.checks.library_errors import in_plain_words
from decode_node.grammar.grammar_text import GrammarText, json_schema
from decode_node.grammar.schemas.schema_checks import check_schema
from edge.http.errors import BadRequest
from engine.grammar.tokenizer import parser_limits
from tests.decode_node.grammar.matching import END_IDS, allowed, ll_tokenizer, spell
from tests.decode_node.grammar.public_schemas import public_schemas

EXPECTED = Path(__file__).with_name("expected_answers.json")


def compiled(schema: Any) -> LLMatcher | str:
    """Returns a schema's matcher, or why it is refused."""
    try:
        check_schema(schema, "schema")
    except BadRequest as error:
        return error.message
    grammar = GrammarText().write(json_schema(schema))
    matcher = LLMatcher(ll_tokenizer(), grammar, log_level=0, limits=parser_limits())
    return in_plain_words(matcher.get_error()) if matcher.is_error() else matcher


@cache
def verdicts() -> list[LLMatcher | str]:
    """Returns what `compiled` says of each schema."""
    return [compiled(public.schema) for public in public_schemas()]


def matchers() -> dict[int, LLMatcher]:
    """Returns the matchers of all schemas that are accepted, by number."""
    return {n: found for n, found in enumerate(verdicts()) if not isinstance(found, str)}


def can_write(matcher: LLMatcher, document: Any) -> bool:
    """Says whether a document can be an answer, as it is usually written."""
    ids = spell(json.dumps(document, ensure_ascii=False))
    matcher = matcher.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def judged() -> dict[str, Any]:
    """Returns what `expected_answers.json` keeps."""
    refused = {}
    unreachable, wrong = [], []
    for number, public in enumerate(public_schemas()):
        matcher = verdicts()[number]
        if isinstance(matcher, str):
            refused[f"{number} {public.place}"] = matcher
            continue
        for i, document in enumerate(public.valid):
            if not can_write(matcher, in_order_of(public.schema, document)):
                unreachable.append(f"{number} {public.place} {i}")
        for i, document in enumerate(public.invalid):
            if can_write(matcher, document) or can_write(
                matcher, in_order_of(public.schema, document)
            ):
                wrong.append(f"{number} {public.place} {i}")
    return {"refused": refused, "unreachable": unreachable, "accepted_though_invalid": wrong}


def in_order_of(schema: Any, document: Any) -> Any:
    """Returns a document with properties in the order in which answers have them, as far as the
    schema's plain keywords and its own references tell."""
    return _ordered(schema, schema, document, 0)


def _ordered(root: Any, schema: Any, document: Any, depth: int) -> Any:
    parts = [part for part in _parts(root, schema, depth) if isinstance(part, dict)]
    if isinstance(document, list):
        items = [part["items"] for part in parts if isinstance(part.get("items"), dict)]
        return [_ordered(root, {"allOf": items}, item, depth + 1) for item in document]
    if not isinstance(document, dict):
        return document
    names: dict[str, list[Any]] = {}
    for part in parts:
        for name, inner in (part.get("properties") or {}).items():
            names.setdefault(name, []).append(inner)
    for part in parts:
        for name in part.get("required") or ():
            names.setdefault(name, [])
    others = [
        part["additionalProperties"]
        for part in parts
        if isinstance(part.get("additionalProperties"), dict)
    ]
    order = [name for name in names if name in document]
    order += [name for name in document if name not in names]
    return {
        name: _ordered(root, {"allOf": names.get(name) or others}, document[name], depth + 1)
        for name in order
    }


def _parts(root: Any, schema: Any, depth: int) -> Iterator[Any]:
    """Yields a schema and those that it applies to the same document."""
    if not isinstance(schema, dict) or depth > 40:
        return
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = root
        for step in reference[2:].split("/"):
            found = found.get(step, {}) if isinstance(found, dict) else {}
        yield from _parts(root, found, depth + 1)
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(keyword) or ():
            yield from _parts(root, part, depth + 1)


def random_document(matcher: LLMatcher, seed: int, most: int = 500) -> str | None:
    """Draws an answer, half of the time among tokens that close something; None when it has not
    ended after `most` tokens."""
    draw, ids = random.Random(seed), []
    matcher = matcher.deep_copy()
    for _ in range(most):
        choices = allowed(matcher)
        assert choices, matcher.get_error()
        closing = [token for token in choices if token in _closing()]
        chosen = draw.choice(closing if closing and draw.random() < 0.6 else choices)
        if chosen in END_IDS:
            return ll_tokenizer().decode_bytes(ids).decode()
        assert matcher.consume_token(chosen), matcher.get_error()
        ids.append(chosen)
    return None


@cache
def _closing() -> frozenset[int]:
    tokens = range(ll_tokenizer().vocab_size)
    texts = {token: ll_tokenizer().decode_str([token]) for token in tokens}
    return frozenset(t for t, text in texts.items() if set(text) & set('"}]')) | {*END_IDS}


def main() -> None:
    EXPECTED.write_text(json.dumps(judged(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
