"""All kinds of tools that clients of the Responses API run: as functions, and as their calls."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from decode_node.answer.responses.argument_text import ArgumentText
from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.history import history
from decode_node.protocol.bodies.valid_strings import ValidStrings
from edge.http.errors import BadRequest
from tests.decode_node.chat_clients import thinking_tokenizer
from tests.decode_node.http_node import http_node
from tests.decode_node.test_responses_api import RESPONSES, chat_of, events_of, joined

NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": {}},
        {"type": "custom", "name": "tell", "defer_loading": True},
    ],
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
}
CODE = {
    "type": "custom",
    "name": "code",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
}
TOOLS: list[dict[str, Any]] = [
    NAMESPACE,
    {"type": "web_search", "search_context_size": "low"},
    PATCH,
    CODE,
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def one_node(script: str, **settings: Any) -> Any:
    return http_node(tokenizer=thinking_tokenizer(), scripts=[script], context=4096, **settings)


async def both(script: str, **fields: Any) -> list[dict[str, Any]]:
    """Returns the items of a whole answer; a stream of the same tokens must have the same."""
    body = {"input": "hello", "tools": TOOLS, **fields}
    async with one_node(script) as node:
        whole = (await node.client.post(RESPONSES, json=body)).json()
        for tokens in (1, 7):
            node.engine.tokens_per_output = tokens
            streamed = await node.client.post(RESPONSES, json={**body, "stream": True})
            events = events_of(streamed.text)
            assert events[-1]["response"]["status"] == whole["status"]
            assert without_ids(joined(events)) == without_ids(whole["output"])
    return list(whole["output"])


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_all_kinds_of_tools_are_functions_to_the_model() -> None:
    use = chat_of({"input": "a", "tools": TOOLS}).tool_use()
    functions = {tool.name: tool.raw["function"] for tool in use.tools}
    assert list(functions) == [
        "agents__spawn", "agents__tell", "patch", "code", "local_shell", "shell", "apply_patch",
    ]  # fmt: skip
    assert functions["agents__spawn"]["description"] == "Other agents.\n\nStarts one."
    assert "defer_loading" not in functions["agents__tell"]
    assert '(lark):\nstart: "*** Begin"' in functions["patch"]["description"]
    assert use.tools[3].strict and use.tools[2].strict
    assert functions["code"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"


async def test_items_add_tools_and_renew_them() -> None:
    """Codex sends the tools of its makers' newer models so, and none in the field."""
    item = {"type": "additional_tools", "role": "developer"}
    new = {"type": "function", "name": "new", "description": "Newer.", "parameters": {}}
    items = [
        {**item, "tools": [NAMESPACE, {"type": "web_search"}, new]},
        {"role": "user", "content": "hello"},
        {**item, "tools": [{**new, "description": "Newest."}]},
    ]
    chat = chat_of({"input": items})
    assert [message.role for message in chat.messages] == ["user"]
    told = {tool.name: tool.raw["function"] for tool in chat.tool_use().tools}
    assert list(told) == ["agents__spawn", "agents__tell", "new"]
    assert told["new"]["description"] == "Newest."
    called = await both(call("agents__tell", '{"input": "x"}'), input=items, tools=None)
    assert without_ids(called) == [
        {"type": "custom_tool_call", "status": "completed", "name": "tell", "namespace": "agents",
         "input": "x"}
    ]  # fmt: skip
    for tools, param in ((None, "input.0.tools"), ([{"type": "mcp"}], "input.0.tools.0.type")):
        with pytest.raises(BadRequest) as refused:
            chat_of({"input": [{**item, "tools": tools}, items[1]]})
        assert refused.value.param == param


SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}


async def test_a_search_of_the_client_finds_tools_that_can_be_called() -> None:
    """The result alone shows them: what is cached of the prompt before it serves."""
    fields = {"tools": [SEARCH, PATCH], "input": [{"role": "user", "content": "hello"}]}
    [asked] = await both(call("tool_search", '{"query": "agents"}'), **fields)
    assert asked == asked | {
        "type": "tool_search_call", "execution": "client", "arguments": {"query": "agents"},
        "status": "completed",
    }  # fmt: skip
    assert asked["id"].startswith("tsc_")
    found = {"type": "tool_search_output", "execution": "client", "call_id": asked["call_id"]}
    second = {**found, "tools": [NAMESPACE, {**PATCH, "description": "Another."}]}
    none = {**found, "tools": []}
    fields["input"] += [asked, second, asked, none]
    chat = chat_of(fields)
    use = chat.tool_use()
    names = ["tool_search", "patch", "agents__spawn", "agents__tell"]
    assert [tool.name for tool in use.tools] == names
    assert [tool.name for tool in use.shown] == names[:2]
    told = [str(message.content) for message in chat.messages if message.role == "tool"]
    assert '"agents__spawn", "description": "Other agents' in told[0]
    assert told[1] == "No tool was found."
    [called] = await both(call("agents__spawn", '{"n": 1}'), **fields)
    assert (called["type"], called["namespace"]) == ("function_call", "agents")
    # A search that a server ran is left out, as before.
    left = {**fields, "input": [*fields["input"][:1], {**asked, "execution": "server"}]}
    assert [message.role for message in chat_of(left).messages] == ["user"]


async def test_a_call_in_a_namespace_is_told_with_both_names() -> None:
    items = await both(call("agents__spawn", '{"n": 1}'))
    assert without_ids(items) == [
        {"type": "function_call", "status": "completed", "name": "spawn", "namespace": "agents",
         "arguments": '{"n": 1}'},
    ]  # fmt: skip
    assert items[0]["id"].startswith("fc_")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n+a \\"b\\" \\u00e4 \\ud83d\\ude00"}', '*** Begin\n+a "b" ä 😀'),
        ('{"input": "a\nb"}', "a\nb"),
        ('{ "input" : "" }', ""),
        ('{"why": "x", "input": "y"}', "y"),
        ('{"patch": "z"}', '{"patch": "z"}'),
        ('["a"]', '["a"]'),
    ],
)
async def test_a_custom_tool_gets_its_text(arguments: str, text: str) -> None:
    items = await both(call("patch", arguments))
    assert without_ids(items) == [
        {"type": "custom_tool_call", "status": "completed", "name": "patch", "input": text}
    ]
    assert items[0]["id"].startswith("ctc_")


def test_the_text_of_arguments_does_not_depend_on_where_they_are_cut() -> None:
    arguments = '{"input": "a\\n\\"\\\\ \\u00e4\\ud83d\\ude00 end"}'
    whole = json.loads(arguments)["input"]
    for size in range(1, len(arguments)):
        reader = ArgumentText("input")
        pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        # Escapes come whole: strings are made valid before, which keeps parts of them back.
        told = "".join(reader.push(piece) for piece in _whole_escapes(pieces))
        assert told + reader.finish() == whole


def _whole_escapes(pieces: list[str]) -> list[str]:
    strings = ValidStrings()
    return [strings.push(piece) for piece in pieces]


async def test_tools_with_fields_of_their_own_are_told_so() -> None:
    ran = await both(call("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 9}'))
    assert without_ids(ran) == [
        {"type": "local_shell_call", "status": "completed", "action": {
            "type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9, "user": None,
            "working_directory": None,
        }}
    ]  # fmt: skip
    ran = await both(call("shell", '{"commands": ["ls"]}'))
    assert ran[0]["type"] == "shell_call" and ran[0]["action"]["commands"] == ["ls"]
    patch = '{"type": "update_file", "path": "a.py", "diff": "@@\\n-a\\n+b"}'
    ran = await both(call("apply_patch", patch))
    assert ran[0]["type"] == "apply_patch_call"
    assert ran[0]["operation"] == json.loads(patch)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("local_shell", '{"command": "rm -r /"}'),
        ("local_shell", '{"command": ["a"], "timeout_ms": }'),
        ("shell", "{}"),
        ("apply_patch", '{"type": "move_file", "path": "a"}'),
    ],
)
async def test_what_such_a_tool_cannot_have_runs_nothing(name: str, arguments: str) -> None:
    (item,) = await both(call(name, arguments))
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", name, arguments)


def test_a_history_of_such_calls_is_one_of_functions() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "namespace": "agents", "name": "spawn", "call_id": "c1",
         "arguments": "{}"},
        {"type": "custom_tool_call", "id": "ctc_1", "name": "patch", "call_id": "c2", "input": "x"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c3", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None}},
        {"type": "apply_patch_call", "call_id": "c4", "status": "completed",
         "operation": {"type": "delete_file", "path": "a"}},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
        {"type": "item_reference", "id": "lsh_1"},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "3"},
        {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "shell_call", "call_id": "c5", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c5", "output": [
            {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}},
            {"stdout": "c", "stderr": "", "outcome": {"type": "timeout"}},
        ]},
    ]  # fmt: skip
    messages = history(chat_of({"input": items}).messages, TemplateForms())
    calls = [c for m in messages for c in m.get("tool_calls", [])]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("c1", "agents__spawn", {}),
        ("c2", "patch", {"input": "x"}),
        ("c3", "local_shell", {"command": ["ls"]}),
        ("c4", "apply_patch", {"type": "delete_file", "path": "a"}),
        ("c5", "shell", {"commands": ["ls"]}),
    ]
    results = [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"]
    assert results == [
        ("c1", "1"), ("c2", "2"), ("c3", "3"), ("c4", "completed"),
        ("c5", "ab\n(exit code 2)\nc\n(timed out)"),
    ]  # fmt: skip


def test_words_that_are_sent_behind_the_calls_of_their_turn_are_of_that_turn() -> None:
    """@tanstack/ai-openai 0.23.1 sends a turn so, whatever came first, as it was recorded."""
    items: list[dict[str, Any]] = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "weather?"}],
        },
        {"type": "function_call", "call_id": "c", "id": "fc_1", "name": "f", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "I do it."},
        {"type": "function_call_output", "call_id": "c", "output": "warm"},
        {"type": "message", "role": "assistant", "content": "Warm."},
        {"type": "message", "role": "assistant", "content": "And more."},
    ]
    swapped = [items[0], items[2], items[1], *items[3:]]
    messages = chat_of({"input": items}).messages
    assert messages == chat_of({"input": swapped}).messages
    assert [message.role for message in messages] == [
        "user", "assistant", "tool", "assistant", "assistant",
    ]  # fmt: skip
    assert messages[1].content == "I do it." and messages[1].tool_calls


async def test_tools_that_a_server_runs_are_left_out_where_there_are_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = "decode_node.http.ignored_fields"
    caplog.set_level(logging.WARNING, logger)
    body = {"input": "a", "tools": TOOLS, "store": True}
    async with one_node("hi") as node:
        for _ in range(2):
            assert (await node.client.post(RESPONSES, json=body)).status_code == 200
    named = [record.args for record in caplog.records if record.name == logger]
    assert named == [("store",), ("tools.web_search",)]
    async with one_node("hi", strict_fields=True) as node:
        refused = await node.client.post(RESPONSES, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "store"


async def test_errors_name_the_place_in_a_namespace() -> None:
    bad = {**NAMESPACE, "tools": [*NAMESPACE["tools"], {"type": "function", "name": ""}]}
    twice = {**NAMESPACE, "tools": NAMESPACE["tools"][:1] * 2}
    async with one_node("hi") as node:
        for tools, param in (
            ([{"type": "mcp"}, bad], "tools.1.tools.2.name"),
            ([{"type": "mcp"}, twice], "tools.1.tools.1.name"),
            ([{"type": "mcp"}], "tools.0.type"),
            ([{"type": "functoin", "name": "f"}], "tools.0.type"),
            ([{"type": "namespace", "name": "n"}], "tools.0.tools"),
            ([{**NAMESPACE, "tools": [NAMESPACE]}], "tools.0.tools.0.type"),
            ([{**PATCH, "format": {"type": "xml"}}], "tools.0.format.type"),
            ([{**PATCH, "format": {"type": "grammar"}}], "tools.0.format.syntax"),
        ):
            refused = await node.client.post(RESPONSES, json={"input": "a", "tools": tools})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param


CHOICES: list[tuple[Any, tuple[str, str, list[str]]]] = [
    ({"type": "custom", "name": "patch"}, ("named", "patch", [])),
    ({"type": "function", "namespace": "agents", "name": "spawn"}, ("named", "agents__spawn", [])),
    ({"type": "local_shell"}, ("named", "local_shell", [])),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "custom", "name": "patch"}, {"type": "apply_patch"}
        ]},
        ("required", "", ["patch", "apply_patch"]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_choices_are_those_of_chats(choice: Any, expected: tuple[str, str, list[str]]) -> None:
    use = chat_of({"input": "a", "tools": TOOLS, "tool_choice": choice}).tool_use()
    mode, name, allowed = expected
    assert (use.mode, use.name) == (mode, name)
    assert [tool.name for tool in use.tools] == (allowed or [tool.name for tool in use.shown])
    assert len(use.shown) == 7
