"""Writes llguidance grammars: expressions as text, rules with names, one text for all of it.

The language is llguidance's variant of Lark. Special tokens are named by id, never by their
text, so that text which merely looks like a marker is no marker.

    text = GrammarText()
    call = text.rule("call", sequence(token(7), literal("get_weather"), json_schema(arguments)))
    text.write(start=repeat(call, 1))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from decode_node.grammar.schemas.formats import with_exact_formats
from decode_node.grammar.schemas.known_keywords import (
    with_known_keywords,
    without_unfollowed_numbers,
    without_unknown_patterns,
)

WHITE_SPACE = r" |\r?\n( {0,20}|\t{0,10})"
"""Limits the white space between the parts of a JSON document to a blank, or a line break and what
indents the next line. Models that are not sure of themselves write all the blanks that they may."""

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Turns off that the library spells what must come, all of it, in each step, and allows only the
first token of that. It took 3 s a step where a million characters must come, while all other rows
waited; and every spelling of a text is as good as another that the model prefers."""

Expression = str
"""The right side of a rule; the functions here return expressions that bind tightly enough to stand
in any other."""

_ANY_TEXT = r"(.|\n)*"
NOTHING: Expression = '""'
"""Matches the empty text."""
ANY_TEXT: Expression = f"/{_ANY_TEXT}/"
"""Matches any text of ordinary tokens."""


_IS_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:))", re.MULTILINE)
_LARK_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|<[^<>\s"/]+>')
"""Texts and regular expressions, in which nothing is a special token, and names of such."""


def literal(text: str) -> Expression:
    """Matches exactly `text`, written with ordinary tokens."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def regex(pattern: str) -> Expression:
    """Matches what the whole of `pattern` matches (syntax of Rust's `regex`, nearly Python's)."""
    return f"/{regex_to_lark(pattern, use_ascii='')}/"


def json_schema(
    schema: Mapping[str, Any] | bool, white_space: str | None = None, *, lenient: bool = False
) -> Expression:
    """Matches the JSON documents of a schema (draft 2020-12). Properties come in the order in which
    the schema lists them.

    `white_space` is a regular expression for what stands between the parts; None for a little
    white space, "" for none. `lenient` passes over keywords that are not supported.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {
        "whitespace_pattern": WHITE_SPACE if white_space is None else white_space
    }
    if white_space == "":
        options = {"whitespace_flexible": False}
    if lenient:
        options["lenient"] = True
        schema = without_unfollowed_numbers(without_unknown_patterns(schema))
    exact = with_exact_formats(with_known_keywords(schema))
    return f"%json {json.dumps({**exact, 'x-guidance': options}, ensure_ascii=False)}"


def token(token_id: int) -> Expression:
    """Matches one token by its id, whatever its text."""
    return f"<[{token_id}]>"


def any_token_but(token_ids: Iterable[int]) -> Expression:
    """Matches one token, special ones included, that is not listed."""
    ids = sorted(set(token_ids))
    return f"<[^{','.join(map(str, ids))}]>" if ids else "<[*]>"


def sequence(*parts: Expression) -> Expression:
    """Matches the parts in a row."""
    real = [part for part in parts if part != NOTHING]
    return f"({' '.join(real)})" if real else NOTHING


def either(*options: Expression) -> Expression:
    """Matches one of the options."""
    return f"({' | '.join(options)})"


def optional(part: Expression) -> Expression:
    return f"({part})?"


def repeat(part: Expression, least: int = 0, most: int | None = None) -> Expression:
    """Matches `part` from `least` to `most` times; None stands for any number."""
    if most == 0:
        return NOTHING
    if most is None and least <= 1:
        return f"({part}){'+' if least else '*'}"
    return f"({part}){{{least},{'' if most is None else most}}}"


class GrammarText:
    """Collects the rules of one grammar.

    1. `rule` and the like add rules and return expressions that refer to them
    2. `write` returns the text of the grammar, which begins with `start`

    `special` has the ids of special tokens by their texts, for texts in which they are meant.
    """

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = special or {}
        self._rules: dict[str, str] = {}
        self._others: dict[str, dict[str, str]] = {}

    def rule(self, name: str, expression: Expression) -> Expression:
        """Adds a rule and returns a reference to it. A name that is taken gets a number."""
        name = self._free(name)
        self._rules[name] = f"{name}: {expression}"
        return name

    def until(self, name: str, marker: str, pattern: str = _ANY_TEXT) -> Expression:
        """Matches text that `pattern` matches whole, up to and with the first such `marker`."""
        name = self._free(name)
        inner, end = (regex_to_lark(part, use_ascii="") for part in (pattern, _escaped(marker)))
        self._rules[name] = f"{name}[lazy]: /({inner}){end}/"
        return name

    def without(self, name: str, marker: str) -> Expression:
        """Matches any text in which `marker` does not come."""
        name = self._free(name).upper()
        inner = regex_to_lark(_escaped(marker), use_ascii="")
        self._rules[name] = f"{name}: /{_ANY_TEXT}/ & ~/{_ANY_TEXT}{inner}{_ANY_TEXT}/"
        return name

    def not_beginning(self, name: str, pattern: str) -> Expression:
        """Matches any text of which no beginning matches `pattern`."""
        name = self._free(name).upper()
        inner = regex_to_lark(pattern, use_ascii="")
        self._rules[name] = f"{name}: /{_ANY_TEXT}/ & ~/({inner}){_ANY_TEXT}/"
        return name

    def choice(self, name: str, texts: Sequence[str]) -> Expression:
        """Matches one of several texts, as one terminal: some may be the beginning of others."""
        name = self._free(name).upper()
        self._rules[name] = f"{name}: {' | '.join(map(literal, texts))}"
        return name

    def token_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text."""
        return self._special.get(text)

    def marked(self, text: str) -> Expression:
        """Matches `text`, whose special tokens are meant as such."""
        if not text:
            return NOTHING
        names = sorted((name for name in self._special if name in text), key=len, reverse=True)
        if not names:
            return literal(text)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        return sequence(
            *(
                token(self._special[part]) if part in self._special else literal(part)
                for part in parts
                if part
            )
        )

    def grammar(self, name: str, written: str) -> Expression:
        """Matches a whole grammar of another, whose rules have names of their own: Lark with
        a rule `start`, or EBNF with a rule `root` (GBNF, as llama.cpp and xgrammar have it)."""
        name = self._free(name)
        if _IS_LARK.search(written):
            self._others[name] = {"lark_grammar": self._with_ids(written)}
        else:
            self._others[name] = {"ebnf": written}
        return f"@{name}"

    def write(self, start: Expression) -> str:
        """Returns the grammar's text; `start` is the whole answer. Grammars in EBNF are still to be
        converted: `GrammarChecker` does."""
        lines = [_OPTIONS, f"start: {start}", *self._rules.values()]
        own = "\n".join(lines) + "\n"
        if not self._others:
            return own
        grammars = [{"name": "answer", "lark_grammar": own}]
        grammars += [{"name": name, **other} for name, other in self._others.items()]
        return json.dumps({"grammars": grammars})

    def _with_ids(self, lark: str) -> str:
        """Returns Lark in which special tokens are named by id, as everywhere in a grammar."""

        def by_id(found: re.Match[str]) -> str:
            token_id = self._special.get(found[0])
            return found[0] if token_id is None else token(token_id)

        return _LARK_TOKENS.sub(by_id, lark)

    def _free(self, name: str) -> str:
        taken = {"start", "answer", *self._others, *(rule.lower() for rule in self._rules)}
        found, number = name, 1
        while found in taken:
            number += 1
            found = f"{name}_{number}"
        return found


def _escaped(text: str) -> str:
    """Returns a regular expression that matches `text` alone."""
    return re.sub(r"([!-/:;=?@\[-^`{-~])", r"\\\1", text)
