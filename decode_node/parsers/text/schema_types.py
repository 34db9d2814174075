"""Turns the text of a parameter into JSON, by the type that the tool's schema gives it.

Formats with tags write values as text: `5` may be a number or a string, and only the schema knows.
Text that is JSON of the right type is given verbatim. What cannot be read as its type is given as
the string that it is: the caller's own check then says more than a value that was guessed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from decode_node.protocol.chat.tools import Tool

_TYPE_OF = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_UNIONS = ("anyOf", "oneOf", "allOf")
_MAX_REFERENCES = 8
_MAX_OPTIONS = 64
_MAX_LITERAL = 1 << 13
"""Characters of a Python literal. Longer ones are read only if they are one string: compiling
others may take as long as hundreds of tokens."""
_ONE_STRING = re.compile(
    r"""\"{3}(?:[^\\]|\\.)*\"{3}|'{3}(?:[^\\]|\\.)*'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""",
    re.DOTALL,
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def parameter_types(tool: Tool, name: str) -> frozenset[str]:
    """Returns the JSON types that a parameter may have; none if the schema does not say."""
    root = tool.parameters
    properties = root.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return types_of(schema, root)


def types_of(schema: Any, root: Mapping[str, Any], budget: int = _MAX_REFERENCES) -> frozenset[str]:
    """Returns the JSON types that a schema allows, `root` being what its references look into."""
    if not isinstance(schema, Mapping) or budget == 0:
        return frozenset()
    if isinstance(kinds := schema.get("type"), str):
        return frozenset((kinds,))
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_of, values))
    if "const" in schema:
        return frozenset((_type_of(schema["const"]),))
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_referenced(reference, root), root, budget - 1)
    for key in _UNIONS:
        if isinstance(schema.get(key), list):
            found = [types_of(option, root, budget - 1) for option in _options(schema, key)]
            return frozenset().union(*found)
    return frozenset()


def part_of(schema: Any, key: str | None, root: Mapping[str, Any]) -> Any:
    """Returns the schema of an object's property, or with None that of a list's elements; None if
    the schema does not say."""
    return _part_of(schema, key, root, _MAX_REFERENCES)


def _part_of(schema: Any, key: str | None, root: Mapping[str, Any], budget: int) -> Any:
    if not isinstance(schema, Mapping) or budget == 0:
        return None
    properties = schema.get("properties")
    if key is not None and isinstance(properties, Mapping) and key in properties:
        return properties[key]
    options = [option for name in _UNIONS for option in _options(schema, name)]
    if isinstance(reference := schema.get("$ref"), str):
        options.append(_referenced(reference, root))
    found = (_part_of(option, key, root, budget - 1) for option in options)
    inner = schema.get("items" if key is None else "additionalProperties")
    return next((one for one in found if one is not None), inner)


def _options(schema: Mapping[str, Any], name: str) -> list[Any]:
    options = schema.get(name)
    return options[:_MAX_OPTIONS] if isinstance(options, list) else []


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def _type_of(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "integer" if isinstance(value, int) else "number"
    return _TYPE_OF.get(type(value), "")


def is_text(types: frozenset[str], *, is_json: bool) -> bool:
    """Says whether a value is a string whatever it looks like. `is_json`: one of unknown type is
    JSON, if it can be read so."""
    return types == {"string"} or (not types and not is_json)


def value_json(text: str, types: frozenset[str]) -> str:
    """Returns a value as JSON text."""
    stripped = text.strip()
    if "null" in types and stripped.lower() in ("null", "none"):
        return "null"
    if "string" in types:
        return json_text(text)
    found = _parsed(stripped)
    if found is not _NOTHING and (not types or _fits(found, types)):
        return stripped
    if found is _NOTHING:
        found = _python_value(stripped)
    if found is not _NOTHING and types:
        if isinstance(found, float) and found.is_integer() and "integer" in types:
            found = int(found)
        if _fits(found, types):
            return json_text(found)
    return json_text(text)


def literal_json(text: str) -> str:
    """Returns a literal as JSON text: verbatim if it is JSON, and read as Python's if not. Raises
    ValueError."""
    if _parsed(text) is not _NOTHING:
        return text.strip()
    return json_text(python_value(text))


_NOTHING = object()


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _parsed(text: str) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _python_value(text: str) -> object:
    try:
        found = python_value(text)
        json_text(found)
    except ValueError:
        return _NOTHING
    return found


def python_value(text: str) -> object:
    """Returns the value of a Python literal, with JSON's names for the constants as well. Nothing
    is evaluated. Raises ValueError."""
    if len(text) > _MAX_LITERAL and not _ONE_STRING.fullmatch(text.strip()):
        raise ValueError(f"a literal of {len(text)} characters is too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they would quote the text
            return _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError("no Python literal") from error


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name.lower() in _CONSTANTS:
            return _CONSTANTS[name.lower()]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=number)):
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(v) for key, v in zip(keys, values, strict=True)}
    raise ValueError("no Python literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys of objects are strings")


def json_text(value: object) -> str:
    """Returns a value as JSON text that UTF-8 can write. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return json.dumps(value) if _SURROGATE.search(text) else text
