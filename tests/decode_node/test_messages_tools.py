"""Turns of /v1/messages change which tools there are."""

from __future__ import annotations

from typing import Any

import pytest

from edge.http.errors import BadRequest
from tests.decode_node.test_messages_api import USER
from tests.decode_node.test_messages_input import NEW, assistant, change, request_of, shown, user


def test_a_turn_defines_a_tool_where_there_are_no_others() -> None:
    turn = user(change("addition", type="tool_definition", definition=NEW))
    cases: list[dict[str, Any]] = [{"tools": None}, {"tools": []}]
    for tools in cases:
        use = request_of(messages=[USER, turn], **tools).to_chat().tool_use()
        assert ([tool.name for tool in use.tools], use.mode) == (["new"], "auto")
        assert shown(turn, **tools)[0][1].startswith("new can be called now: {")
    assert request_of(tools=None).to_chat().tools is None


def test_a_tool_whose_turn_a_compaction_cut_off_is_shown_with_the_others() -> None:
    add = {**NEW, "name": "add", "defer_loading": True}
    named = change("addition", type="tool_reference", name="add")
    defined = change("addition", type="tool_definition", definition={**NEW, "name": "add"})
    removed = change("removal", type="tool_reference", name="add")
    summary = {"type": "compaction", "content": "They met."}
    call = {"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "tool_reference", "tool_name": "add"}
    ]}  # fmt: skip
    for introduction in (named, defined, call):
        turns = [USER, user(introduction), assistant(summary), USER]
        use = request_of(tools=[NEW, add], messages=turns).to_chat().tool_use()
        assert [tool.name for tool in use.tools] == ["new", "add"]
        assert [tool.name for tool in use.shown] == ["new", "add"]
        again = shown(user(introduction), assistant(summary), user(named), tools=[NEW, add])
        assert again[-1][1] == "add can be called."
    behind = [USER, assistant(summary, {"type": "text", "text": "on"}), user(defined)]
    use = request_of(tools=[NEW, add], messages=[USER, user(named), *behind]).to_chat().tool_use()
    assert [tool.name for tool in use.shown] == ["new"]
    turns = [USER, user(named, removed), assistant(summary), USER]
    use = request_of(tools=[NEW, add], messages=turns).to_chat().tool_use()
    assert [tool.name for tool in use.tools] == [tool.name for tool in use.shown] == ["new"]


@pytest.mark.parametrize("kind", ["computer_toolset_20260801", "browser_toolset_20260801"])
def test_tools_that_need_a_screen_are_left_out_beside_others(kind: str) -> None:
    request = request_of(tools=[{"type": kind}, NEW])
    assert [tool.name for tool in request.to_chat().tool_use().tools] == ["new"]
    assert request.unknown_fields() == [f"tools.{kind}"]


def test_nothing_is_said_of_tools_that_a_server_would_run() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    added = change("addition", type="tool_definition", definition=search)
    removed = change("removal", type="tool_reference", name="web_search")
    words = {"type": "text", "text": "go on"}
    request = request_of(tools=[NEW], messages=[USER, user(added, words), user(removed)])
    assert [tool.name for tool in request.to_chat().tool_use().tools] == ["new"]
    assert request.unknown_fields() == ["tools.web_search_20250305"]
    assert shown(user(added, words), user(removed), tools=[NEW]) == [("user", "go on")]
    assert shown(user(removed, words), tools=[NEW, search]) == [("user", "go on")]
    newer = change("addition", type="tool_definition", definition={**NEW, "name": "web_search"})
    text = shown(user(newer), tools=[NEW, search])[0][1]
    assert text.startswith("web_search can be called now: {")
    with pytest.raises(BadRequest, match="runs no tools") as refusal:
        request_of(tools=None, messages=[USER, user(added)]).to_chat()
    assert refusal.value.param == "messages.1.content.0.tool_addition.tool.definition.type"
    with pytest.raises(BadRequest, match="^only custom tools, bash") as refusal:
        request_of(tools=[{"type": "unheard_of", "name": "x"}], messages=[USER]).to_chat()
    assert refusal.value.param == "tools.0.type"
    with pytest.raises(BadRequest, match="say nothing"):
        request_of(tools=[NEW], messages=[user(added)]).to_chat()
