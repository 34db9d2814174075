"""Reads the one constraint of a request and writes it as the body of its grammar.

fields ── find_constraint ──▶ Constraint ── express ──▶ an expression, its rules in a GrammarText
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from decode_node.grammar.grammar_text import Expression, GrammarText, json_schema, regex
from decode_node.grammar.schemas.schema_checks import (
    check_schema,
    check_size,
    read_json,
    without_additional_properties,
)
from decode_node.grammar.structural_tag import LEGACY_KEYS, express_tag
from decode_node.protocol.bodies.structured_output import (
    AnswerFormat,
    StructuredFields,
    StructuredOutputs,
)
from edge.http.errors import BadRequest

_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
_ALIASES = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of the request itself, by what they are the same as."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Says what an answer must look like.

    Attributes:
        param: The field that says so, for errors.
        kind: `json`, `regex`, `choice`, `grammar` or `structural_tag`.
        value: As the kind has it; a schema is no text any more.
        white_space: A regular expression for the white space in JSON; None for the usual one.
    """

    param: str
    kind: str
    value: Any
    white_space: str | None = None

    def says_the_same_as(self, other: Constraint) -> bool:
        """Says whether an answer follows this one exactly if it follows the other: also with the
        order of properties, and `1` is not `true`."""
        given, others = ((one.kind, one.value, one.white_space) for one in (self, other))
        try:
            return json.dumps(given) == json.dumps(others)
        except RecursionError:
            return False


def find_constraint(fields: StructuredFields) -> Constraint | None:
    """Returns the constraint of a request; None for a free answer. Clients that know servers of
    several ages send one under its old name and its new one.

    Raises:
        BadRequest: There are several that differ, or it is not one.
    """
    found: dict[str, Constraint] = {}
    if fields.response_format is not None:
        _note(found, _of_response_format(fields.response_format))
    if fields.structured_outputs is not None:
        for constraint in _of_structured_outputs(fields.structured_outputs):
            _note(found, constraint)
    for name, kind in _ALIASES.items():
        if (value := getattr(fields, name)) is not None:
            white_space = fields.guided_whitespace_pattern if name == "guided_json" else None
            _note(found, _constraint(name, kind, value, white_space))
    first = next(iter(found.values()), None)
    for other in found.values():
        if first is not None and other is not first and not first.says_the_same_as(other):
            message = f"{first.param} and {other.param} exclude each other; send one"
            raise BadRequest(message, param=other.param)
    return first


def express(constraint: Constraint, text: GrammarText) -> Expression:
    """Returns what the body of the answer must be; adds its rules. Raises `BadRequest`."""
    param, value = constraint.param, constraint.value
    if constraint.kind == "json":
        return json_schema(value, constraint.white_space)
    if constraint.kind == "regex":
        return regex(value)
    if constraint.kind == "choice":
        return text.choice("choice", value)
    if constraint.kind == "grammar":
        return text.grammar("grammar", value)
    return express_tag(value, text, param)


def _note(found: dict[str, Constraint], constraint: Constraint | None) -> None:
    if constraint is not None:
        found[constraint.param] = constraint


def _of_response_format(form: AnswerFormat) -> Constraint | None:
    param = "response_format"
    if form.type == "text":
        return None
    if form.type in ("json_object", "json_schema"):
        for name, schema in (("schema", form.schema_), ("value", form.value)):
            if schema is not None:
                check_schema(schema, f"{param}.{name}")
                return Constraint(param, "json", schema)
    if form.type == "json_object":
        return Constraint(param, "json", {"type": "object"})
    if form.type == "structural_tag":
        parts = {
            key: value
            for key, value in form.model_dump(by_alias=True, exclude_none=True).items()
            if key in (*LEGACY_KEYS, "format")
        }
        return _constraint(param, "structural_tag", {"type": "structural_tag", **parts})
    if form.json_schema is None:
        raise BadRequest(f"{param}.json_schema is missing", param=f"{param}.json_schema")
    schema = form.json_schema.schema_
    place = f"{param}.json_schema.schema"
    if schema is None:
        schema = {"type": "object"}
    check_schema(schema, place)
    return Constraint(param, "json", schema)


def _of_structured_outputs(outputs: StructuredOutputs) -> list[Constraint]:
    """Returns all there are: none but one is right. vLLM refuses an object without any, too."""
    name = "structured_outputs"
    white_space = outputs.whitespace_pattern
    if outputs.disable_any_whitespace:
        white_space = ""
    found = []
    for kind in _KINDS:
        value = outputs.json_ if kind == "json" else getattr(outputs, kind)
        if value is not None:
            found.append(_constraint(f"{name}.{kind}", kind, value, white_space))
    if outputs.json_object:
        found.append(Constraint(f"{name}.json_object", "json", {"type": "object"}, white_space))
    if not found:
        raise BadRequest(f"{name} needs one of {', '.join(_KINDS)} or json_object", param=name)
    if outputs.disable_additional_properties and found[0].kind == "json":
        only = found[0]
        closed = without_additional_properties(only.value)
        found[0] = Constraint(only.param, only.kind, closed, white_space)
    return found


def _constraint(param: str, kind: str, value: Any, white_space: str | None = None) -> Constraint:
    if kind in ("json", "structural_tag"):
        if isinstance(value, str):
            value = read_json(value, param)
        if kind == "json":
            check_schema(value, param)
    elif kind == "choice":
        check_size("".join(value) or "-", param)
    else:
        check_size(value, param)
    if white_space:
        check_size(white_space, "whitespace_pattern")
    return Constraint(param, kind, value, white_space)
