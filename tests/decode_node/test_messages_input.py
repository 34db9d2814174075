"""Agents send more to /v1/messages than text and calls: tools, blocks, a header of their own."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.history import history
from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.messages.messages import MessagesRequest
from decode_node.serving.prompts.system_turns import system_first
from edge.http.errors import BadRequest
from tests.decode_node.http_node import http_node
from tests.decode_node.test_messages_api import ASK, MESSAGES, TOOLS, USER, one_node

HEADER = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=cli;"
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
DEFERRED = [
    {"name": f"mcp_{i}", "description": "x" * 99, "input_schema": {"type": "object"},
     "defer_loading": True}
    for i in range(3)
]  # fmt: skip


def request_of(**fields: Any) -> MessagesRequest:
    return parse_body(json.dumps({**ASK, **fields}).encode(), MessagesRequest)


def shown(*turns: dict[str, Any], **fields: Any) -> list[tuple[str, Any]]:
    chat = request_of(messages=[USER, *turns], **fields).to_chat()
    return [(m["role"], m["content"]) for m in history(chat.messages, TemplateForms())][1:]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def system(*texts: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER, system("late")], ["system late", "user hello"]),
        (
            [system("a"), USER, system("b", "c"), USER],
            ["system a||\n\n||b||c", "user hello", "user hello"],
        ),
        (
            [system("a"), USER, assistant(), system("late"), USER],
            ["system a", "user hello", "assistant ", "system late", "user hello"],
        ),
        ([USER, assistant(), system("late")], ["user hello", "assistant ", "system late"]),
    ],
)
def test_what_the_system_says_before_the_first_answer_stands_in_front(
    messages: list[dict[str, Any]], expected: list[str]
) -> None:
    chat = request_of(messages=messages).to_chat()
    told = history(system_first(chat.messages), TemplateForms(text_joint="||"))
    assert [f"{message['role']} {message['content']}" for message in told] == expected


def test_turns_of_the_system_with_images_stay() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    late = {"role": "system", "content": [{"type": "image", "source": source}]}
    chat = request_of(messages=[USER, late]).to_chat()
    assert system_first(chat.messages) == chat.messages


async def test_where_turns_of_the_system_stand_is_a_setting() -> None:
    body = {"max_tokens": 2, "system": "rules", "messages": [USER, system("late")]}
    prompts = []
    for settings in ({}, {"system_turns": "in-place"}):
        async with one_node(**settings) as node:
            assert (await node.client.post(MESSAGES, json=body)).status_code == 200
            spec = list(node.engine.requests.values())[-1].request.spec
            counted = await node.client.post(f"{MESSAGES}/count_tokens", json=body)
            assert counted.json()["input_tokens"] == len(spec.prompt_token_ids)
            prompts.append(node.tokenizer.decode(spec.prompt_token_ids, skip_special_tokens=False))
    moved, kept = (
        [prompt.index(word) for word in ("rules", "late", "hello")] for prompt in prompts
    )
    assert moved == sorted(moved)
    assert kept[0] < kept[2] < kept[1]


async def test_conversations_of_an_agent_share_their_prefix() -> None:
    """Its first system block is one line that is another one in each conversation."""
    prompts = []
    async with http_node() as node:
        for version in ("a1b", "c2d"):
            system = [
                {"type": "text", "text": HEADER.format(version)},
                {"type": "text", "text": "You are an agent."},
            ]
            answer = await node.client.post(
                MESSAGES, json={"max_tokens": 2, "messages": [USER], "system": system}
            )
            assert answer.status_code == 200
            spec = list(node.engine.requests.values())[-1].request.spec
            prompts.append(node.tokenizer.decode(spec.prompt_token_ids))
        joined = HEADER.format("a") + "\nYou are an agent."
        body = {"max_tokens": 2, "messages": [USER], "system": joined}
        assert (await node.client.post(MESSAGES, json=body)).status_code == 200
        body["system"] = HEADER.format("a")
        assert (await node.client.post(MESSAGES, json=body)).status_code == 200
        last, alone = list(node.engine.requests.values())[-2:]
        prompts.append(node.tokenizer.decode(last.request.spec.prompt_token_ids))
        assert node.tokenizer.decode(alone.request.spec.prompt_token_ids) == "u:hello\n"
        prompts += [await _prompt_of_chat(node, system), await _prompt_of_chat(node, joined)]
        assert await _prompt_of_chat(node, HEADER.format("a")) == "u:hello\n"
    assert set(prompts) == {"s:You are an agent.\nu:hello\n"}


async def _prompt_of_chat(node: Any, system: Any) -> str:
    """Returns what is made of the chat that a gateway makes of such a request."""
    turns = [{"role": "system", "content": system}, USER]
    body = {"max_tokens": 2, "messages": turns}
    assert (await node.client.post("/v1/chat/completions", json=body)).status_code == 200
    spec = list(node.engine.requests.values())[-1].request.spec
    told = await node.client.post("/tokenize", json={"messages": turns})
    assert told.json()["tokens"] == list(spec.prompt_token_ids)
    return str(node.tokenizer.decode(spec.prompt_token_ids))


def test_blocks_that_hold_text_are_text() -> None:
    document = {"type": "text", "media_type": "text/plain", "data": "the body"}
    result = {"type": "search_result", "title": "T", "source": "s", "content": [
        {"type": "text", "text": "found"}
    ]}  # fmt: skip
    assert shown(
        user(
            {"type": "document", "source": document, "title": "A", "context": "from b"},
            {"type": "document", "source": {"type": "content", "content": "more"}},
            result,
        ),
        assistant(
            {"type": "redacted_thinking", "data": "AAAA"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
                {"type": "web_search_result", "title": "Page", "url": "http://x",
                 "encrypted_content": "AAAA"}
            ]},
            {"type": "text", "text": "So it is."},
        ),
        user({"type": "tool_result", "tool_use_id": "c", "content": [result]}),
    ) == [
        ("user", "A\nfrom b\nthe body\nmore\nT\ns\nfound"),
        ("assistant", "Page\nhttp://x\nSo it is."),
        ("tool", "T\ns\nfound"),
    ]  # fmt: skip


def test_what_tools_of_another_server_said_is_text_as_far_as_it_can_be_read() -> None:
    ran = {"type": "code_execution_result", "stdout": "4", "stderr": "", "content": []}
    hidden = {"type": "encrypted_code_execution_result", "encrypted_stdout": "AAAA"}
    advice = {"type": "advisor_result", "text": "Look again."}
    answered = [{"type": "text", "text": "sunny"}, {"type": "text", "text": "and warm"}]
    turn = assistant(
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "code_execution_tool_result", "tool_use_id": "s", "content": ran},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": hidden},
        {"type": "mcp_tool_use", "id": "m", "name": "w", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": answered},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": "No rain."},
        {"type": "tool_search_tool_result", "tool_use_id": "t", "content": {"type": "x"}},
        {"type": "advisor_tool_result", "tool_use_id": "a", "content": advice},
        {"type": "text", "text": "So it is."},
    )
    assert shown(turn) == [("assistant", "4\nsunny\nand warm\nNo rain.\nLook again.\nSo it is.")]
    left_out = request_of(messages=[USER, turn]).unknown_fields()
    assert left_out == [
        f"messages.{kind}" for kind in ("fallback", "mcp_tool_use", "tool_search_tool_result")
    ]


def test_a_compaction_stands_for_what_was_before_it() -> None:
    turns = [assistant({"type": "text", "text": "long ago"}), USER]
    summary = {"type": "compaction", "content": "They met."}
    after = assistant({"type": "text", "text": "before"}, summary, {"type": "text", "text": "on"})
    chat = request_of(messages=[USER, *turns, after, USER]).to_chat()
    messages = [(m["role"], m["content"]) for m in history(chat.messages, TemplateForms())]
    assert messages == [("user", "They met."), ("assistant", "on"), ("user", "hello")]
    chat = request_of(messages=[USER, assistant(summary)]).to_chat()
    assert [m["content"] for m in history(chat.messages, TemplateForms())] == ["They met."]


def test_tools_that_the_api_defines_have_its_input() -> None:
    kinds = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    use = request_of(tools=kinds).to_chat().tool_use()
    assert [tool.name for tool in use.tools] == ["bash", "str_replace_based_edit_tool", "memory"]
    assert "restart" in use.tools[0].parameters["properties"]
    commands = [tool.parameters["properties"]["command"]["enum"] for tool in use.tools[1:]]
    assert commands[0] == ["view", "create", "str_replace", "insert"]
    assert commands[1] == [*commands[0], "delete", "rename"]


async def test_what_this_server_has_not_is_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = "decode_node.http.ignored_fields"
    caplog.set_level(logging.WARNING, logger)
    body = {
        **ASK,
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    async with one_node() as node:
        for _ in range(2):
            assert (await node.client.post(MESSAGES, json=body)).status_code == 200
    named = [record.args for record in caplog.records if record.name == logger]
    assert named == [
        ("tools.web_search_20250305",), ("context_management.clear_tool_uses_20250919",)
    ]  # fmt: skip
    async with one_node(strict_fields=True) as node:
        assert (await node.client.post(MESSAGES, json=body)).status_code == 400


async def test_deferred_tools_are_shown_where_a_result_refers_to_them() -> None:
    call = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "tool_reference", "tool_name": "mcp_1"}
    ]}  # fmt: skip
    body = {**ASK, "tools": [SEARCH, *DEFERRED]}
    turns = [USER, assistant(call), user(found)]
    async with one_node() as node:
        for messages in ([USER], turns):
            answer = await node.client.post(MESSAGES, json={**body, "messages": messages})
            assert answer.status_code == 200, answer.text
        first, second = (
            node.tokenizer.decode(fake.request.spec.prompt_token_ids)
            for fake in node.engine.requests.values()
        )
    assert "ToolSearch" in first and "mcp_" not in first
    assert second.startswith(first) and "mcp_1 can be called now" in second
    assert "mcp_0" not in second
    use = request_of(tools=body["tools"], messages=turns).to_chat().tool_use()
    assert [tool.name for tool in use.tools] == ["ToolSearch", "mcp_1"]
    server = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    use = request_of(tools=[server, SEARCH, *DEFERRED]).to_chat().tool_use()
    assert len(use.tools) == len(use.shown) == 4


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": tool}


MCP_1 = {"type": "tool_reference", "name": "mcp_1"}
NEW = {"name": "new", "description": "y", "input_schema": {"type": "object"}}


def test_turns_add_and_withdraw_tools() -> None:
    added = {"role": "system", "content": [
        change("addition", **MCP_1),
        change("addition", type="tool_definition", definition=NEW),
    ]}  # fmt: skip
    removed = user(change("removal", **MCP_1), {"type": "text", "text": "go on"})
    tools = [SEARCH, *DEFERRED]

    request = request_of(tools=tools, messages=[USER, added])
    use = request.to_chat().tool_use()
    assert [tool.name for tool in use.tools] == ["ToolSearch", "mcp_1", "new"]
    assert [tool.name for tool in use.shown] == ["ToolSearch"]
    (_, text), (_, later) = shown(added, removed, tools=tools)
    assert text.startswith("mcp_1 can be called now: {") and "\nnew can be called now: {" in text
    assert later.startswith("mcp_1 can be called no more.") and later.endswith("go on")

    use = request_of(tools=tools, messages=[USER, added, removed]).to_chat().tool_use()
    assert [tool.name for tool in use.tools] == ["ToolSearch", "new"]
    again = user(change("addition", **MCP_1))
    use = request_of(tools=tools, messages=[USER, added, removed, again]).to_chat().tool_use()
    assert [tool.name for tool in use.tools] == ["ToolSearch", "mcp_1", "new"]
    assert shown(added, removed, again, tools=tools)[-1][1] == "mcp_1 can be called."


def test_many_changes_take_time_in_proportion() -> None:
    """Each looked through all tools."""
    tools = [{**NEW, "name": f"t{i}"} for i in range(4000)]
    blocks = [change("removal", type="tool_reference", name="t0")] * 2000
    for i in range(2000):
        definition = {**NEW, "name": f"d{i}"}
        blocks.append(change("addition", type="tool_definition", definition=definition))
    request = request_of(tools=tools, messages=[USER, user(*blocks)])
    begun = time.process_time()
    assert len(request.read_tools.functions) == 6000
    assert time.process_time() - begun < 0.3


def test_a_tool_that_is_defined_anew_is_the_newer_one() -> None:
    newer = {**NEW, "input_schema": {"type": "object", "required": ["a"]}}
    turn = user(change("addition", type="tool_definition", definition=newer))
    use = request_of(tools=[NEW], messages=[USER, turn]).to_chat().tool_use()
    assert [tool.parameters for tool in use.tools] == [newer["input_schema"]]
    assert not use.shown and '"required"' in shown(turn, tools=[NEW])[0][1]


def test_a_tool_that_was_withdrawn_is_neither_called_nor_hidden() -> None:
    turn = user(change("removal", type="tool_reference", name="new"))
    messages = [USER, turn]
    use = request_of(tools=[NEW], messages=messages).to_chat().tool_use()
    assert (use.mode, use.tools, [tool.name for tool in use.shown]) == ("none", (), ["new"])
    for choice in ({"type": "any"}, {"type": "tool", "name": "new"}):
        request = request_of(tools=[NEW], messages=messages, tool_choice=choice)
        with pytest.raises(BadRequest, match="withdrawn"):
            request.to_chat().tool_use()


@pytest.mark.parametrize(
    ("block", "place"),
    [
        (change("addition", type="tool_reference", name="x"), "tool_addition.tool.name"),
        (change("removal", type="tool_reference", name="mcp_9"), "tool_removal.tool.name"),
        (change("addition", type="mcp_toolset_reference", server_name="s"), "tool_addition.tool"),
        (change("removal", type="tool_definition", definition=NEW), "tool_removal.tool"),
        (
            change("addition", type="tool_definition", definition={"name": 3}),
            "tool_addition.tool.definition.name",
        ),
        (
            change("addition", type="tool_definition", definition={**NEW, "input_schema": 3}),
            "tool_addition.tool.definition.input_schema",
        ),
        ({"type": "tool_addition"}, "tool_addition.tool"),
    ],
)
def test_a_change_of_no_tool_is_refused_at_its_place(block: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        request_of(tools=[SEARCH, *DEFERRED], messages=[USER, user(block)]).to_chat()
    assert refusal.value.param == f"messages.1.content.0.{place}"


def test_the_older_name_of_the_form_is_known() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    chat = request_of(output_format=form).to_chat()
    assert (
        chat.response_format == request_of(output_config={"format": form}).to_chat().response_format
    )


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
async def test_a_thread_is_refused_so_that_clients_send_the_conversation(
    thread: dict[str, Any],
) -> None:
    """Were it ignored, the next request would have the last turn alone."""
    ask = {"max_tokens": 2, "messages": [USER]}
    async with http_node() as node:
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            answer = await node.client.post(path, json={**ask, "thread": thread})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["details"] == {
                "error_code": "thread_unsupported_request",
                "unsupported": ["thread"],
            }
        answer = await node.client.post(MESSAGES, json={**ask, "thread": None})
        assert answer.status_code == 200


def test_blocks_that_are_said_as_text_cost_what_they_say() -> None:
    """All text so far was copied for each of them: 8 MB took 6 seconds, and minutes where each
    repeated the definition of a tool."""
    long = {**DEFERRED[0], "description": "x" * 1_000_000}
    reference = {"type": "tool_reference", "tool_name": "mcp_0"}
    blocks = [reference] * 60_000
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    request = request_of(tools=[SEARCH, long], messages=[USER, user(result)])
    begun = time.process_time()
    chat = request.to_chat()
    assert time.process_time() - begun < 2
    told = str(chat.messages[-1].content)
    assert told.count("x" * 1000) == 1000 and len(told) < 3_000_000
    assert told.startswith("mcp_0 can be called now: {")
    assert told.endswith("\nmcp_0 can be called.\nmcp_0 can be called.")


def test_a_tool_of_a_name_that_is_there_is_refused_at_its_place() -> None:
    request = request_of(tools=[SEARCH, SEARCH])
    with pytest.raises(BadRequest) as error, request.named_fields():
        request.to_chat().tool_use()
    assert error.value.param == "tools.1.name"
    assert error.value.message == "tools.1.name: a tool of this name is there already"


def test_many_turns_of_the_system_are_copied_once() -> None:
    """In the event loop, 8 MB took 28 seconds."""
    late = [{"role": "system", "content": "\U0001f600" + "x" * 1000}] * 4000
    messages = request_of(messages=[USER, *late]).to_chat().messages
    begun = time.process_time()
    first, *others = system_first(messages)
    assert time.process_time() - begun < 0.5
    assert str(first.content).count("\n\n") == 3999 and len(others) == 1
