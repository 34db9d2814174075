"""Grammars of arguments in formats that have no JSON object: one rule a parameter.

A text's constraints that tags can express are its values, its length, or its pattern; for a strict
tool anything more is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from decode_node.grammar.grammar_text import (
    NOTHING,
    Expression,
    GrammarText,
    either,
    json_schema,
    literal,
    optional,
    regex,
    repeat,
    sequence,
    token,
)
from decode_node.parsers.families.formats import BracedFormat, XmlFormat
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.schema_types import is_text, types_of
from decode_node.protocol.bodies.known_patterns import is_known_pattern
from decode_node.protocol.chat.tools import Tool
from edge.http.errors import BadRequest
from engine.frontend.text.pieces import Piece

_ANY_TEXT = r"(.|\n)*"
_BARE_KEY = re.compile(r"[\w.$@-]+")
_ANY_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_TEXT_KEYWORDS = ("enum", "const", "pattern", "minLength", "maxLength")
_T = TypeVar("_T")
_KINDS = {list: "a list", str: "a text", int: "a whole number"}
_HIDDEN_KEYWORDS = ("format", "allOf", "not", "if", "contentEncoding", "contentMediaType")


def spell(markers: MarkerTokens, text: str) -> Expression:
    """Matches a text of a format, the markers in it as tokens where the model has them."""
    return _spelled(markers.pieces(text))


def _spelled(pieces: Sequence[Piece]) -> Expression:
    return sequence(*(token(p) if isinstance(p, int) else literal(p) for p in pieces))


class TaggedParameters:
    """Writes the parameters of calls in an `XmlFormat`."""

    def __init__(self, text: GrammarText, form: XmlFormat, markers: MarkerTokens) -> None:
        self._text = text
        self._form = form
        self._markers = markers

    def of(self, tool: Tool) -> Expression:
        """Matches the parameters of one call, in the order of the schema. Without properties in the
        schema any may come. Raises `BadRequest` for what a strict tool asks in vain."""
        text, properties = self._text, _properties(tool)
        before = self._form.before_key
        if not properties:
            if _closes_object(tool.parameters):
                return NOTHING
            key = text.rule("key", regex(_ANY_KEY))
            parts = [spell(self._markers, before), key, self._value(tool, "", {})]
            return repeat(text.rule("parameter", sequence(*parts)))
        parts = []
        for name, schema in properties.items():
            head = spell(self._markers, before + self._form.written_key(name))
            value = self._value(tool, name, schema)
            rule = text.rule("parameter", sequence(head, value))
            parts.append(rule if name in _required(tool) else optional(rule))
        return sequence(*parts)

    def _value(self, tool: Tool, name: str, schema: Any) -> Expression:
        """Matches what is behind a parameter's name, and its end tag."""
        form, pieces = self._form, self._markers.pieces
        end, rest = self._end_of(name)
        types = types_of(schema, tool.parameters)
        is_string = is_text(types, is_json=form.is_json) or not types or "string" in types
        line = "\n" if form.has_lines else ""
        between = form.inner_gap if form.before_value else ""
        mark = NOTHING
        if form.text_mark:
            between = form.text_mark if is_string else ""
            mark = NOTHING if is_string else regex(form.other_mark)
        head = sequence(
            _spelled(pieces(form.after_key + between)),
            mark,
            _spelled(pieces(form.before_value + line)),
        )
        if not is_string:
            value = sequence(_json(self._text, tool, schema), _spelled(pieces(line + end)))
        else:
            pattern = _pattern(tool, name, schema)
            value = self._until(pieces((line if pattern else "") + end), pattern)
        return sequence(head, value, rest, _spelled(pieces(form.inner_gap)))

    def _end_of(self, name: str) -> tuple[str, Expression]:
        """Returns the end tag of a parameter, and what of it is not certain: its name, where any
        parameter may come."""
        begin, has_name, end = self._form.after_value.partition("{}")
        if name or not has_name:
            return begin + name * bool(has_name) + end, NOTHING
        return begin, sequence(regex(_ANY_KEY), spell(self._markers, end))

    def _until(self, marker: list[Piece], pattern: str) -> Expression:
        return _text_until(self._text, marker, pattern)


def _text_until(text: GrammarText, marker: list[Piece], pattern: str) -> Expression:
    """Matches text up to and with a marker. Where the marker's token comes behind text, other text
    may hold the same."""
    first, *others = marker
    if isinstance(first, int):
        return sequence(regex(pattern or _ANY_TEXT), _spelled(marker))
    part = text.until("value", first, pattern or _ANY_TEXT)
    return sequence(part if pattern or not others else repeat(part, 1), _spelled(others))


def keyword_arguments(text: GrammarText, tool: Tool) -> Expression:
    """Matches the arguments of a pythonic call, in the order of the schema: values are JSON, whose
    constants are understood as Python's are."""
    known = {k: v for k, v in _properties(tool).items() if k.isidentifier()}
    values = {name: _json(text, tool, schema) for name, schema in known.items()}
    return _listed(text, tool, values, joint="=", separator=", ")


def braced_arguments(
    text: GrammarText, tool: Tool, form: BracedFormat, markers: MarkerTokens
) -> Expression:
    """Matches the arguments of a call in a `BracedFormat`, sorted as its template sorts them.
    Strings stand between quotes of the format; all else is JSON, which is read too."""
    known = {k: v for k, v in _properties(tool).items() if _BARE_KEY.fullmatch(k)}
    quote, values = markers.pieces(form.quote), dict[str, Expression]()
    for name in sorted(known, key=str.lower):
        types = types_of(known[name], tool.parameters)
        if types and types != {"string"}:
            values[name] = _json(text, tool, known[name])
            continue
        string = _text_until(text, quote, _pattern(tool, name, known[name]))
        values[name] = sequence(_spelled(quote), string)
    return _listed(text, tool, values, joint=":", separator=",")


def _listed(
    text: GrammarText, tool: Tool, values: dict[str, Expression], *, joint: str, separator: str
) -> Expression:
    """Matches names with their values in this order, those that are required and some others."""
    if missing := _required(tool) - set(values):
        raise _refused(tool, f"{min(missing)!r} cannot be the name of a keyword argument")
    first = following = NOTHING
    for name in reversed(values):
        argument = text.rule("argument", sequence(literal(f"{name}{joint}"), values[name]))
        here = sequence(argument, following)
        there = sequence(literal(separator), argument, following)
        if name in _required(tool):
            first, following = text.rule("first", here), text.rule("following", there)
        else:
            first = text.rule("first", _or(here, first))
            following = text.rule("following", _or(there, following))
    return first


def _or(this: Expression, other: Expression) -> Expression:
    return optional(this) if other == NOTHING else either(this, other)


def _pattern(tool: Tool, name: str, schema: Any) -> str:
    """Returns the pattern of a text with constraints, of which null ones say nothing; "" for any
    text."""
    if not isinstance(schema, Mapping):
        return ""
    said = {key: schema[key] for key in _TEXT_KEYWORDS if schema.get(key) is not None}
    hidden = [key for key in _HIDDEN_KEYWORDS if key in schema]
    kinds = {"length" if key.endswith("Length") else key for key in said}
    if tool.strict and (hidden or len(kinds) > 1):
        what = hidden[0] if hidden else " with ".join(said)
        raise _refused(tool, f"{name!r}: {what} is not supported for a text in this model's format")
    if "enum" in said or "const" in said:
        values = _typed(tool, name, "enum", said.get("enum", [said.get("const")]), list)
        texts = [value for value in values if isinstance(value, str)]
        return "|".join(map(re.escape, texts))
    if "pattern" in said:
        pattern = _typed(tool, name, "pattern", said["pattern"], str)
        return _whole(pattern) if tool.strict or is_known_pattern(pattern) else ""
    if said:
        least, most = (
            _typed(tool, name, key, said[key], int) if key in said else ""
            for key in ("minLength", "maxLength")
        )
        return f"(.|\\n){{{least or 0},{most}}}"
    return ""


def _typed(tool: Tool, name: str, key: str, value: Any, kind: type[_T]) -> _T:
    """Returns the value of a keyword. Raises `BadRequest` for one of another type."""
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise _refused(tool, f"{name!r}: {key} must be {_KINDS[kind]}")


def _whole(pattern: str) -> str:
    """Returns the pattern of whole texts in which `pattern` is found, as JSON Schema means it."""
    begin = "" if pattern.startswith("^") else "(.|\n)*"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(.|\n)*"
    return f"{begin}({pattern.removeprefix('^').removesuffix('$' if not end else '')}){end}"


def _json(text: GrammarText, tool: Tool, schema: Any) -> Expression:
    root = tool.parameters
    if isinstance(schema, Mapping):
        schema = {**{k: root[k] for k in ("$defs", "definitions") if k in root}, **schema}
    elif not isinstance(schema, bool):
        schema = True
    return text.rule("value", json_schema(schema, lenient=not tool.strict))


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(tool: Tool) -> set[str]:
    required = tool.parameters.get("required")
    return (
        {name for name in required if isinstance(name, str)}
        if isinstance(required, list)
        else set()
    )


def _closes_object(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema or schema.get("additionalProperties") is False


def _refused(tool: Tool, why: str) -> BadRequest:
    return BadRequest(f"tool {tool.name!r}: {why}", param="tools")
