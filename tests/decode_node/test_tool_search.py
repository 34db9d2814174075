"""Searches of tools by the client of the Responses API, and limits of the tools in items."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.chat.tools import MAX_TOOLS
from decode_node.protocol.responses.responses import ResponsesRequest
from edge.http.errors import BadRequest
from tests.decode_node.test_responses_api import chat_of
from tests.decode_node.test_responses_tools import SEARCH, both, call, without_ids

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
CUSTOM = {"type": "custom", "name": "patch"}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {}, **more}


def result(*tools: Any, **more: Any) -> dict[str, Any]:
    fields = {"type": "tool_search_output", "execution": "client", "call_id": "c"}
    return {**fields, "tools": list(tools), **more}


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        chat_of({"input": [HELLO], **fields})
    return error.value


def names_of(**fields: Any) -> list[str]:
    return [tool.name for tool in chat_of({"tools": [SEARCH], **fields}).tool_use().tools]


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_item_of_too_many_tools_is_refused_before_they_are_read(
    kind: str, is_nested: bool
) -> None:
    many = [function(f"f{i}") for i in range(20_000)]
    tools = [{"type": "namespace", "name": "n", "tools": many}] if is_nested else many
    empty = {"type": "additional_tools", "tools": []}
    items = [HELLO, result(*tools, type=kind), *[empty] * 800]
    request = parse_body(json.dumps({"input": items}).encode(), ResponsesRequest)
    begun = time.process_time()
    with pytest.raises(BadRequest, match="20000 tools, namespaces included") as error:
        request.unknown_fields()
    assert time.process_time() - begun < 0.5
    assert error.value.param == "input.1.tools"


def test_items_cost_no_more_where_there_are_many_tools() -> None:
    """A minute passed where each item was compared with all functions before it."""
    searches = [result(*[function(f"f{i}_{j}") for j in range(MAX_TOOLS)]) for i in range(62)]
    empty = [{"type": "additional_tools", "tools": []}, result()] * 1500
    body = {"input": [HELLO, *searches, *empty], "tools": [SEARCH]}
    request = parse_body(json.dumps(body).encode(), ResponsesRequest)
    begun = time.process_time()
    names = {one["function"]["name"] for one in request.read_tools.functions}
    assert names == {"tool_search", *(f"f61_{j}" for j in range(1, MAX_TOOLS))}
    assert request.read_tools.hidden == names - {"tool_search"}
    assert time.process_time() - begun < 1


def test_all_items_together_have_a_limit_of_tools() -> None:
    tools = [function(f"f{i}") for i in range(MAX_TOOLS)]
    error = refused(input=[HELLO, *[result(*tools)] * 65])
    assert error.param == "input.65.tools"
    assert "more than 16384 tools in all" in error.message


def test_functions_that_were_found_longest_ago_leave() -> None:
    """Each search adds some: a long conversation would not go on any more."""
    searches = [result(*[function(f"s{i}_{j}") for j in range(5)]) for i in range(60)]
    again = result(function("s20_0", description="Again."))
    chat = chat_of({"input": [HELLO, *searches, again], "tools": [SEARCH, CUSTOM]})
    use = chat.tool_use()
    assert len(use.tools) == MAX_TOOLS and len(use.shown) == 2
    names = {tool.name for tool in use.tools}
    assert {"tool_search", "patch", "s59_4", "s20_0"} <= names
    assert not names & {"s0_0", "s8_4"}
    assert "s0_0" in str(chat.messages[1].content), "the result tells it still"


def test_functions_that_are_shown_have_the_limit() -> None:
    many = [function(f"f{i}") for i in range(MAX_TOOLS - 1)]
    item = {"type": "additional_tools", "tools": many}
    assert len(names_of(input=[HELLO, item, result(function("found"))])) == MAX_TOOLS
    error = refused(tools=[SEARCH, CUSTOM], input=[HELLO, item])
    assert (error.param, error.message) == (
        "tools", "tools and additional_tools have 257 functions, more than 256",
    )  # fmt: skip


def test_a_name_twice_in_a_result_is_that_of_the_first() -> None:
    first = {"type": "namespace", "name": "a", "tools": [function("b__c", description="First.")]}
    second = {"type": "namespace", "name": "a__b", "tools": [function("c"), function("d")]}
    fields: dict[str, Any] = {"input": [HELLO, result(first, second, function("a__b__d"))]}
    assert names_of(**fields) == ["tool_search", "a__b__c", "a__b__d"]
    told = str(chat_of({**fields, "tools": [SEARCH]}).messages[1].content)
    assert told.count("a__b__c") == told.count("a__b__d") == 1 and "First." in told


@pytest.mark.parametrize("kind", ["tools", "additional_tools"])
def test_a_name_twice_among_tools_is_refused_at_its_place(kind: str) -> None:
    twice = [SEARCH, {"type": "namespace", "name": "n", "tools": [function("f"), function("f")]}]
    item = {"type": "additional_tools", "tools": twice}
    error = refused(tools=twice) if kind == "tools" else refused(input=[HELLO, item])
    place = "tools" if kind == "tools" else "input.1.tools"
    assert error.param == f"{place}.1.tools.1.name"
    assert error.message == f"{error.param}: a tool of this name is there already"


async def test_a_tool_that_is_shown_is_called_as_what_it_is() -> None:
    """A search that finds a function of its name changes neither it nor its calls."""
    fields = {"tools": [SEARCH, CUSTOM], "input": [HELLO, result(function("patch"))]}
    items = await both(call("patch", '{"input": "x"}'), **fields)
    assert without_ids(items) == [
        {"type": "custom_tool_call", "status": "completed", "name": "patch", "input": "x"}
    ]


@pytest.mark.parametrize("execution", [{}, {"execution": None}])
def test_searches_need_not_say_who_runs_them(execution: dict[str, Any]) -> None:
    asked = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}, **execution}
    found = {"type": "tool_search_output", "call_id": "c", "tools": [function("f")], **execution}
    fields: dict[str, Any] = {"input": [HELLO, asked, found], "tools": [SEARCH]}
    assert names_of(**fields) == ["tool_search", "f"]
    assert [one.role for one in chat_of(fields).messages] == ["user", "assistant", "tool"]
    for call_id in ({}, {"call_id": None}):
        of_server = [{**one, "call_id": None} | call_id for one in (asked, found)]
        assert names_of(input=[HELLO, *of_server]) == ["tool_search"]


@pytest.mark.parametrize("arguments", ['["a"]', '{"q": NaN}', '{"q": -Infinity}', '{"q": 1e999}'])
async def test_a_search_whose_arguments_cannot_be_sent_is_a_function_call(arguments: str) -> None:
    items = await both(call("tool_search", arguments), tools=[SEARCH], input=[HELLO])
    assert without_ids(items) == [
        {"type": "function_call", "status": "completed", "name": "tool_search",
         "arguments": arguments}
    ]  # fmt: skip
    assert items[0]["id"].startswith("fc_")


@pytest.mark.parametrize("tool", [SEARCH, {"type": "local_shell"}])
def test_a_namespace_has_functions_and_custom_tools_alone(tool: dict[str, Any]) -> None:
    """The items of others' calls have no namespace."""
    error = refused(tools=[{"type": "namespace", "name": "n", "tools": [CUSTOM, tool]}])
    assert error.param == "tools.0.tools.1.type"
    assert error.message.startswith(f"{error.param}: tools of a namespace can be")


def test_the_search_can_be_chosen() -> None:
    choice = {"type": "tool_search"}
    use = chat_of({"input": "a", "tools": [SEARCH, CUSTOM], "tool_choice": choice}).tool_use()
    assert (use.mode, use.name) == ("named", "tool_search")
    with pytest.raises(BadRequest) as error:
        chat_of({"input": "a", "tools": [CUSTOM], "tool_choice": choice}).tool_use()
    assert error.value.param == "tool_choice"


def test_all_grammars_together_have_a_limit() -> None:
    """To read one takes a microsecond a character."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"' + " " * 100_000}
    tools = [{**CUSTOM, "name": f"c{i}", "format": form} for i in range(11)]
    assert len(chat_of({"input": "a", "tools": tools[:10]}).tool_use().tools) == 10
    error = refused(tools=tools)
    assert error.param == "tools.10.format.definition"
    assert error.message.startswith(f"{error.param}: tools have Lark grammars of more than")
