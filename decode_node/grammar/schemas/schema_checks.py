"""Looks at a JSON schema before a grammar is made of it: its size, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from decode_node.grammar.schemas.multiples import MULTIPLE, fault_of_multiple
from edge.http.errors import BadRequest

MAX_BYTES = 1 << 16
"""Size of a schema, a regular expression or a grammar."""
MAX_DEPTH = 32
"""Depth of schemas in each other."""
_MAX_NESTING = 2 * MAX_DEPTH + 2
"""Depth of objects and lists in each other. A level of schemas has two: `properties`, and one."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object of schemas."""
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_VALUES = ("const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", MULTIPLE)
_COUNT = "minProperties"
_MAX_EXACT = 1 << 53
"""The grammar library has numbers as doubles, which are exact up to here."""
_INEXACT = (
    "has a whole number beyond 2^53, which cannot be kept exactly; leave it out, or make it a "
    "string"
)
_OPEN_NAMES = (
    "counts properties of any name, of which an answer may repeat one; list and require them, or "
    "leave it out"
)
_SINGLE = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "additionalItems",
)  # fmt: skip


def read_json(text: str, param: str) -> Any:
    """Returns what a JSON text says. Raises `BadRequest`."""
    check_size(text, param)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise BadRequest(f"{param} is not valid JSON", param=param) from None


def check_size(text: str, param: str) -> None:
    """Raises `BadRequest` for a text that is too long, or is none."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{param} holds half a surrogate pair", param=param) from None
    if size > MAX_BYTES:
        raise BadRequest(f"{param} has {size} bytes, more than {MAX_BYTES}", param=param)
    if not text.strip():
        raise BadRequest(f"{param} is empty", param=param)


def check_schema(schema: Any, param: str) -> None:
    """Raises `BadRequest` for a schema that is too large or too deep, refers to other documents, or
    says how this server is to write JSON."""
    if schema is True:
        return
    if schema is False:
        raise BadRequest(f"{param}: no document follows the schema false", param=param)
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} must be a JSON schema: an object, true or false", param=param)
    check_json(schema, param)
    if "x-guidance" in schema:
        raise BadRequest(
            f"{param}: the keyword x-guidance is not supported; see structured_outputs",
            param=param,
        )
    check_numbers(schema, param)
    for place, part in subschemas(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise BadRequest(
                f"{param}{place}: a $ref must begin with #; no other document is read", param=param
            )


def check_numbers(schema: Mapping[str, Any], param: str) -> None:
    """Raises `BadRequest` for numbers that answers could not be held to exactly."""
    for place, part in subschemas(schema):
        for keyword, why in unfollowed_keywords(part).items():
            raise BadRequest(f"{param}{place}: {keyword} {why}", param=param)


def unfollowed_keywords(part: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keywords of one schema that the grammar library does not hold answers to, each
    with the reason."""
    found = {key: _INEXACT for key in (*_VALUES, *_BOUNDS) if _has_large_number(part.get(key))}
    if _counts_open_names(part):
        found[_COUNT] = _OPEN_NAMES
    if why := fault_of_multiple(part):
        found.setdefault(MULTIPLE, why)
    return found


def _counts_open_names(part: Mapping[str, Any]) -> bool:
    """Says whether there must be more properties than are listed and required, and than one: the
    grammar lets names come twice that are not listed, and read as JSON they are one."""
    least = part.get(_COUNT)
    if not isinstance(least, int) or least < 2:
        return False
    listed, required = part.get("properties"), part.get("required")
    names = listed if isinstance(listed, dict) else {}
    sure = [name for name in required if name in names] if isinstance(required, list) else []
    is_open = part.get("additionalProperties") is not False or bool(part.get("patternProperties"))
    return is_open and least > len(sure) + 1


def _has_large_number(value: Any) -> bool:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int) and not isinstance(one, bool) and abs(one) > _MAX_EXACT:
            return True
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def check_json(value: Any, param: str) -> None:
    """Raises `BadRequest` for JSON that is nested too deeply, or too long."""
    _check_depth(value, param)
    try:
        size = len(msgspec.json.encode(value))
    except ValueError:
        raise BadRequest(f"{param} holds what JSON cannot write", param=param) from None
    if size > MAX_BYTES:
        raise BadRequest(f"{param} has {size} bytes, more than {MAX_BYTES}", param=param)


def _check_depth(value: Any, param: str) -> None:
    """Needs no stack as deep as the value."""
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise BadRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def without_additional_properties(schema: Any) -> Any:
    """Returns a copy in which objects have no properties but those that are listed."""
    if isinstance(schema, list):
        return [without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: without_additional_properties(value) for key, value in schema.items()}
    if isinstance(copy.get("properties"), dict) and copy.get("type", "object") == "object":
        copy.setdefault("additionalProperties", False)
    return copy


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields a schema and those in it that are objects, each with its place, like
    `.properties.a.items`. Needs no stack as deep as they are."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, part = waiting.pop()
        yield place, part
        inner: list[tuple[str, Any]] = []
        for keyword, value in part.items():
            if keyword in _NAMED and isinstance(value, dict):
                inner += [(f".{keyword}.{name}", named) for name, named in value.items()]
            elif keyword in _LISTED and isinstance(value, list):
                inner += [(f".{keyword}.{i}", listed) for i, listed in enumerate(value)]
            elif keyword in _SINGLE:
                inner.append((f".{keyword}", value))
        waiting += [(place + at, it) for at, it in reversed(inner) if isinstance(it, dict)]
