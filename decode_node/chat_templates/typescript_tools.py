"""Declares tools as TypeScript, as the tokenizer program of Kimi K2.5 and later does.

    # Tools

    ## functions
    namespace functions {
    // What the function does
    type f = (_: {
      // Where it is
      // minLength: 1
      path: string,
      // Default: 3
      lines?: number
    }) => any;
    }

Parameters that are required come first, each kind by name. `$defs` become interfaces before the
function. What that program cannot declare it leaves to the template, which then shows JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TYPESCRIPT_VARIABLE = "tools_ts_str"
"""The variable in which Kimi's templates look for these declarations."""
_INDENT = "  "
_SCALARS = {"integer": "number"}
_UNION_FORMS = {**_SCALARS, "object": "{}", "array": "Array<any>"}
_UNION = ("string", "number", "integer", "boolean", "null", "object", "array")
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_ENUM_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}
_DEFINITIONS = "#/$defs/"


def typescript(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the declarations of tools; None where there are none, or one has a schema that has no
    form here."""
    try:
        functions = [_Function().declared(tool["function"]) for tool in tools]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not functions:
        return None
    body = "\n".join(functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


class _Function:
    """Writes one function. Its methods raise `ValueError` and the like for what has no form."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._names_itself = False

    def declared(self, function: Mapping[str, Any]) -> str:
        parameters = function.get("parameters") or {}
        argument = self._object(parameters, "")
        parts = []
        if self._names_itself:
            fields = ",\n".join(text for *_, text in self._fields(parameters, _INDENT))
            line = "\n" if fields else ""
            parts.append(f"interface parameters {{{line}{fields}{line}}}")
            argument = "parameters"
        for name, schema in dict(self._definitions).items():
            head = _comment(schema.get("description") or "", "")
            parts.append(f"{head}interface {name} {self._type(schema, '')}")
        parts.append(_comment(function.get("description") or "", "").removesuffix("\n"))
        parts.append(f"type {function.get('name', 'function')} = (_: {argument}) => any;")
        return "\n".join(filter(None, parts))

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join([self._type(option, indent) for option in schema["anyOf"]])
        if "enum" in schema:
            return _enum(schema)
        if "type" not in schema:
            if schema:
                raise ValueError("a schema without a type")
            return "any"
        kind: Any = schema["type"]
        if isinstance(kind, list):
            if unknown := set(kind) - set(_UNION):
                raise ValueError(f"unknown types {unknown}")
            return " | ".join([str(_UNION_FORMS.get(one, one)) for one in kind])
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return _SCALARS.get(kind, str(kind))

    def _referred(self, reference: str) -> str:
        if reference == "#":
            self._names_itself = True
            return "parameters"
        name = reference.rpartition("/")[2]
        if not reference.startswith(_DEFINITIONS) or name not in self._definitions:
            raise ValueError(f"unknown reference {reference}")
        return name

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions |= schema.get("$defs") or {}
        inner = indent + _INDENT
        lines = [text for *_, text in sorted(self._fields(schema, inner), key=lambda f: f[:2])]
        more = schema.get("additionalProperties")
        if more is not None:
            if not isinstance(more, bool | dict):
                raise ValueError("additionalProperties is no schema")
            kind = "never" if more is False else self._type(more, inner)
            lines.append(f"{inner}[k: string]: {kind}")
        body = ",\n".join(lines)
        return f"{{\n{body}\n{indent}}}" if lines else "{}"

    def _fields(self, schema: Mapping[str, Any], indent: str) -> list[tuple[bool, str, str]]:
        """Returns (is optional, name, text) of each parameter, as the schema orders them."""
        required = schema.get("required", [])
        found = []
        for name, inner in schema.get("properties", {}).items():
            is_optional = name not in required
            comments = self._comments(inner, indent)
            default = inner.get("default") if isinstance(inner, dict) else None
            if default is not None:
                is_number = isinstance(default, int | float)
                shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
                comments += f"{indent}// Default: {shown}\n"
            mark = "?" * is_optional
            text = f"{comments}{indent}{name}{mark}: {self._type(inner, indent)}"
            found.append((is_optional, name, text))
        return found

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        inner = indent + _INDENT
        if comments := self._comments(items, inner):
            return f"Array<\n{comments}{inner}{self._type(items, inner)}\n{indent}>"
        return f"Array<{self._type(items, indent)}>"

    def _comments(self, schema: Any, indent: str) -> str:
        if not isinstance(schema, dict):
            return ""
        text = _comment(schema.get("description") or "", indent)
        is_plain = not {"$ref", "anyOf", "enum"} & schema.keys()
        kind = schema.get("type") if is_plain else None
        names = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
        limits = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
        return text + (f"{indent}// {limits}\n" if limits else "")


def _comment(text: str, indent: str) -> str:
    lines = [f"{indent}// {line}" if line else "" for line in text.split("\n")]
    return "\n".join(lines) + "\n" if text else ""


def _enum(schema: Mapping[str, Any]) -> str:
    values, kind = schema["enum"], schema.get("type")
    if isinstance(kind, list):
        kinds = [one for one in kind if one != "null"] if len(kind) == 2 else kind
        if len(kinds) != 1:
            raise ValueError("an enum of several types")
        (kind,) = kinds
    allowed = _ENUM_TYPES.get(kind or "", object)
    if not all(value is None or isinstance(value, allowed) for value in values):
        raise ValueError("an enum with a value of another type")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
