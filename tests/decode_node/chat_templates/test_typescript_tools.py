"""Tools as Kimi's own program prepares them; expected texts are what that program writes."""

from __future__ import annotations

from typing import Any

import pytest

from decode_node.chat_templates.typescript_tools import typescript
from decode_node.protocol.bodies.parse_body import validate
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.serving.prompts.chat_prompt import ChatPrompt
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.engine.frontend.small_tokenizers import byte_level_backend

Json = dict[str, Any]

KIMI = (
    "{% if tools_ts_str %}{{ tools_ts_str }}{% elif tools %}"
    "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}{% endif %}"
)


def tool(parameters: Any = None, **fields: Any) -> Json:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def prompt_of(template: str, *tools: Json) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": list(tools)}
    request = validate(body, ChatCompletionRequest)
    tokenizer = Tokenizer(byte_level_backend(), ChatTemplate(template, {}))
    return ChatPrompt(tokenizer).render(request, request.tool_use())


def declared(parameters: Any = None, **fields: Any) -> str | None:
    """Returns the declaration of one function, without what stands around all."""
    text = typescript([tool(parameters, **fields)])
    if text is None:
        return None
    begin, end = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(begin) and text.endswith(end)
    return text[len(begin) : -len(end)]


def test_required_parameters_come_first_with_comments() -> None:
    schema = {
        "type": "object",
        "properties": {
            "b": {"type": "string", "description": "one\n\ntwo", "minLength": 1, "pattern": "^a"},
            "a": {"type": "integer", "default": 3, "maximum": 9},
            "z": {"type": "boolean", "default": True},
            "c": {"type": ["string", "null"], "default": "é"},
        },
        "required": ["z", "b"],
    }
    assert declared(schema, description="Does\nit") == (
        "// Does\n// it\ntype f = (_: {\n"
        "  // one\n\n  // two\n  // minLength: 1, pattern: ^a\n  b: string,\n"
        "  // Default: True\n  z: boolean,\n"
        "  // maximum: 9\n  // Default: 3\n  a?: number,\n"
        '  // Default: "é"\n  c?: string | null\n'
        "}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({}, "any"),
        (True, "any"),
        (False, "null"),
        ({"enum": ["a", 1, None, False]}, '"a" | 1 | None | False'),
        ({"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}, 'number | "x"'),
        ({"type": ["array", "object"]}, "Array<any> | {}"),
        ({"type": "array", "items": {"type": "number"}}, "Array<number>"),
        ({"type": "array"}, "Array<any>"),
        (
            {"type": "array", "items": {"type": "string", "description": "each"}},
            "Array<\n    // each\n    string\n  >",
        ),
        ({"type": "object"}, "{}"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "{\n    [k: string]: number\n  }",
        ),
        (
            {"type": "object", "properties": {"x": {}}, "additionalProperties": False},
            "{\n    x?: any,\n    [k: string]: never\n  }",
        ),
    ],
)
def test_types(schema: Any, written: str) -> None:
    found = declared({"type": "object", "properties": {"p": schema}})
    assert found == f"type f = (_: {{\n  p?: {written}\n}}) => any;"


def test_definitions_become_interfaces() -> None:
    schema = {
        "$defs": {"D": {"type": "object", "description": "d", "properties": {"k": {}}}},
        "properties": {"p": {"$ref": "#/$defs/D"}, "q": {"$ref": "#"}},
    }
    assert declared(schema) == (
        "interface parameters {\n  p?: D,\n  q?: parameters\n}\n"
        "// d\ninterface D {\n  k?: any\n}\n"
        "type f = (_: parameters) => any;"
    )
    assert declared(None) == declared({}) == "type f = (_: {}) => any;"


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "other.json"},
        {"type": ["string", "weird"]},
        {"type": "string", "enum": [1]},
        {"type": ["string", "integer"], "enum": [1]},
        {"type": "object", "additionalProperties": "x"},
        {"type": "object", "properties": []},
        None,
    ],
)
def test_what_cannot_be_declared_is_left_to_the_template(schema: Any) -> None:
    assert declared({"type": "object", "properties": {"p": schema}}) is None
    one = tool({"type": "object", "properties": {"p": schema}})
    shown = prompt_of(KIMI, one)
    assert shown.startswith("<|im_system|>tool_declare<|im_middle|>[{")
    assert typescript([]) is None


def test_tools_reach_kimi_s_templates_sorted_and_in_typescript() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    assert prompt_of(KIMI, tool(schema)) == typescript([tool(schema)])
    older = KIMI.replace("tools_ts_str", "nothing")
    assert prompt_of(older, tool(schema)) == (
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"f","parameters":'
        '{"properties":{"a":{"type":"string"},"b":{"type":"string"}},"type":"object"}},'
        '"type":"function"}]'
    )
