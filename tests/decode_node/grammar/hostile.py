"""Schemas and grammars of somebody who means no good, or who does not know better."""

from __future__ import annotations

from typing import Any


def nested_one_of(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        options = [
            {"type": "object", "properties": {"a": schema, "k": {"const": k}}, "required": ["a"]}
            for k in range(2)
        ]
        schema = {"oneOf": options}
    return schema


def nested_objects(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def all_of_any_of(count: int) -> dict[str, Any]:
    """Multiplies to 2 ** count combinations."""
    options = [
        [{"properties": {f"p{i}": {"maxLength": 3 + i}}}, {"properties": {f"p{i}": {"minimum": i}}}]
        for i in range(count)
    ]
    return {"type": "object", "allOf": [{"anyOf": pair} for pair in options]}


def doubling_refs(count: int) -> dict[str, Any]:
    parts: dict[str, Any] = {"x0": {"type": "object"}}
    for i in range(1, count + 1):
        inner = {"$ref": f"#/$defs/x{i - 1}"}
        parts[f"x{i}"] = {"oneOf": [inner, {"allOf": [inner, {"required": ["a"]}]}]}
    return {"$ref": f"#/$defs/x{count}", "$defs": parts}


HOSTILE_SCHEMAS: dict[str, dict[str, Any]] = {
    "deep": nested_objects(60),
    "oneOf, nested": nested_one_of(10),
    "allOf of anyOf": all_of_any_of(20),
    "references that double": doubling_refs(16),
    "an endless reference": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "multipleOf a large prime": {"type": "integer", "multipleOf": 999983},
    "multipleOf of several": {
        "allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]
    },
    "a huge enum": {"enum": [f"value {i} {'x' * 40}" for i in range(3000)]},
    "another document": {"$ref": "http://127.0.0.1:9/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "an unknown format": {"type": "string", "format": "foo"},
    "lookahead": {"type": "string", "pattern": "^(?=a)b"},
    "nothing": {"type": "integer", "minimum": 5, "maximum": 1},
}

HOSTILE_GRAMMARS: dict[str, str] = {
    "a long chain of rules": "start: r0\n"
    + "\n".join(f"r{i}: r{i + 1}" for i in range(4000))
    + '\nr4000: "x"\n',
    "a long chain of terminals": "start: R0\n"
    + "\n".join(f"R{i}: R{i + 1}" for i in range(4000))
    + '\nR4000: "x"\n',
    "deep parentheses": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "no such rule": "start: nobody",
    "itself": "start: A\nA: A",
    "EBNF in reverse": "root ::= r0\n"
    + "\n".join(f"r{i} ::= r{i + 1}" for i in range(2500))
    + '\nr2500 ::= "x"\n',
    "EBNF, deep": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    "neither": "}{",
}
