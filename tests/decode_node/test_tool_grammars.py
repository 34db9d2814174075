"""Grammars hold a model to the calls that a request demands, behind its reasoning."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.chat_clients import CHAT, MESSAGES, TIME, WEATHER, thinking_tokenizer
from tests.decode_node.http_node import HttpNode, http_node
from tests.engine.frontend.small_tokenizers import byte_level_backend

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("get_weather", SCHEMA), ("get_time", NONE))
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "get_time"}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
JSON = '{"city": "Bonn", "days": 1}'
END = 0
"""The end of every tiny model's output."""
THINK = "<think>why</think>"
BAD_CALL = WEATHER.replace("Köln", "Paris")


@cache
def ll_tokenizer() -> LLTokenizer:
    backend = thinking_tokenizer()._backend
    return LLTokenizer(backend.to_str(), eos_token=[END])


async def grammar_of(node: HttpNode, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 1, **fields}
    response = await node.client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return list(node.engine.requests.values())[-1].request.spec.sampling.grammar


def one_node() -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=["x"], context=1200)


def accepts(grammar: str, text: str) -> bool:
    """Says whether a text is a complete answer; its markers are tokens."""
    matcher = LLMatcher(ll_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = thinking_tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


LAX = [
    {"type": "any"}, {"minimum": "0"}, {"$ref": "http://nowhere/a"}, {"$ref": "#/$defs/none"},
    {"type": "integer", "minimum": 5, "maximum": 3},
]  # fmt: skip


@pytest.mark.parametrize("schema", LAX, ids=str)
async def test_only_a_tool_that_is_strict_or_must_be_called_needs_a_schema_that_can_be_kept(
    schema: dict[str, Any],
) -> None:
    """Some clients want one call at a time, whatever tools their users have found."""
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    function: dict[str, Any] = {"name": "f", "parameters": parameters}
    loose = {"type": "function", "function": function}
    call = '<tool_call>\n{"name": "f", "arguments": {"p": 1}}\n</tool_call>'
    async with one_node() as node:
        tools = [*STRICT, loose]
        for fields in ({"tools": tools}, {"tools": tools, "parallel_tool_calls": False}):
            grammar = await grammar_of(node, **fields)
            assert accepts(grammar, call) and accepts(grammar, WEATHER)
            assert not accepts(grammar, BAD_CALL), "the others are strict still"
            assert accepts(grammar, f"{call}\n{TIME}") is ("parallel_tool_calls" not in fields)
        for tool, choice in (
            (loose, "required"),
            (loose, {"type": "function", "function": {"name": "f"}}),
            ({**loose, "function": {**function, "strict": True}}, "auto"),
        ):
            body = {"messages": MESSAGES, "tools": [tool], "tool_choice": choice}
            response = await node.client.post(CHAT, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tools"


CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "required", {"tools": TOOLS, "tool_choice": "required"},
        [WEATHER, TIME, f"{WEATHER}\n{TIME}", f"{THINK}{TIME}", f"{THINK}\n\n{TIME}"],
        ["", "text", THINK, f"text {WEATHER}", f"{WEATHER} text", BAD_CALL, JSON],
    ),
    (
        "one of several", {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        [WEATHER, f"{THINK}{TIME}"],
        [f"{WEATHER}\n{TIME}", "text"],
    ),
    (
        "named", {"tools": TOOLS, "tool_choice": NAMED},
        [TIME, f"{THINK}{TIME}"],
        [WEATHER, f"{TIME}\n{TIME}", "text"],
    ),
    (
        "named, with a form for content",
        {"tools": TOOLS, "tool_choice": NAMED, "response_format": ANSWER},
        [TIME], [JSON, WEATHER],
    ),
    (
        "strict tools", {"tools": STRICT},
        ["text", WEATHER, f"I ask. {WEATHER}\n{TIME}", f"{THINK}text"],
        [BAD_CALL, f"text {BAD_CALL}"],
    ),
    (
        "parameters left out",
        {
            "tools": [
                {"type": "function", "function": {"name": "get_time"}},
                {"type": "function", "function": {"name": "get_weather", "parameters": None}},
            ],
            "tool_choice": "required",
        },
        [TIME],
        [TIME.replace("{}", '{"zone": 1}'), WEATHER],
    ),
    (
        "a form for content besides tools", {"tools": TOOLS, "response_format": ANSWER},
        [JSON, WEATHER, f"{THINK}{JSON}", f"{THINK}{TIME}"],
        ["text", BAD_CALL, f"{JSON}{WEATHER}"],
    ),
    (
        "a form alone", {"tools": TOOLS, "tool_choice": "none", "response_format": ANSWER},
        [JSON, f"{THINK}{JSON}"], [WEATHER, "text"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "good", "bad"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
async def test_what_a_request_lets_through(
    fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    async with one_node() as node:
        grammar = await grammar_of(node, **fields)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


async def test_reasoning_that_the_prompt_opened_or_closed() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    async with one_node() as node:
        opened = {"chat_template_kwargs": {"open_thinking": True}}
        grammar = await grammar_of(node, **fields, **opened)
        assert accepts(grammar, f"why</think>{TIME}") and not accepts(grammar, TIME)
        grammar = await grammar_of(node, **fields, reasoning_effort="none")
        assert accepts(grammar, TIME) and not accepts(grammar, f"{THINK}{TIME}")


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"parallel_tool_calls": True}])
async def test_a_free_choice_needs_no_grammar(fields: dict[str, Any]) -> None:
    async with one_node() as node:
        assert await grammar_of(node, tools=TOOLS, **fields) == ""


async def test_a_schema_that_cannot_be_enforced_is_refused_by_name() -> None:
    broken = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": broken, "strict": True}}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    async with one_node() as node:
        response = await node.client.post(CHAT, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("tools")
        assert not node.engine.requests


def drawn(grammar: str, seed: int) -> str | None:
    """Returns a random answer that the grammar lets through; None if it does not end soon."""
    matcher, rng = LLMatcher(ll_tokenizer(), grammar, log_level=0), random.Random(seed)
    tokenizer, ids = thinking_tokenizer(), list[int]()
    while len(ids) < 400:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
        chosen = rng.choice(allowed)
        assert matcher.consume_token(chosen)
        if chosen == END:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(chosen)
    return None


async def test_a_model_of_random_weights_makes_valid_calls() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none"}
    async with one_node() as node:
        grammar = await grammar_of(node, **fields)
        texts = [text for seed in range(30) if (text := drawn(grammar, seed)) is not None]
        assert len(texts) >= 10
        for text in texts:
            node.engine.scripts = [node.tokenizer.encode(text + "</s>")]
            body = {"messages": MESSAGES, "max_tokens": 500, **fields}
            (choice,) = (await node.client.post(CHAT, json=body)).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            for call in choice["message"]["tool_calls"]:
                schema = SCHEMA if call["function"]["name"] == "get_weather" else NONE
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


async def test_a_named_choice_ends_with_stop_as_the_api_documents() -> None:
    node = http_node(tokenizer=thinking_tokenizer(), scripts=[TIME], context=1200)
    async with node as node:
        body = {"messages": MESSAGES, "tools": TOOLS}
        for choice, reason in ((NAMED, "stop"), ("required", "tool_calls"), ("auto", "tool_calls")):
            asked = await node.client.post(CHAT, json={**body, "tool_choice": choice})
            (found,) = asked.json()["choices"]
            assert found["message"]["tool_calls"] and found["finish_reason"] == reason


def harmony_tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    words = ("start", "end", "message", "channel", "constrain", "return", "call")
    backend.add_special_tokens([f"<|{word}|>" for word in words])
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    template += "{% endfor %}<|start|>assistant{# <|channel|>analysis<|message|> to=functions. #}"
    return Tokenizer(backend, ChatTemplate(template, {}))


async def test_messages_of_gpt_oss_have_their_channels() -> None:
    tokenizer = harmony_tokenizer()
    call = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    final = f"<|channel|>final<|message|>{JSON}"
    parsers = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    async with http_node(tokenizer=tokenizer, scripts=["x"], context=1200, **parsers) as node:
        required = await grammar_of(node, tools=TOOLS, tool_choice="required")
        formed = await grammar_of(node, tools=TOOLS, response_format=ANSWER)

    def accepted(grammar: str, text: str) -> bool:
        reader = LLTokenizer(tokenizer._backend.to_str(), eos_token=[END])
        matcher = LLMatcher(reader, grammar, log_level=0)
        ids = tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert accepted(required, call) and accepted(required, thought + call)
    assert not accepted(required, final) and not accepted(required, thought + final)
    assert accepted(formed, final) and accepted(formed, thought + final)
    assert accepted(formed, thought + call) and not accepted(formed, JSON)
