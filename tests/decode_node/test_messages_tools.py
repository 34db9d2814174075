"""Turns of /v1/messages change which tools there are."""

from __future__ import annotations

from tests.decode_node.test_messages_api import USER
from tests.decode_node.test_messages_input import NEW, change, request_of, shown, user


def test_a_turn_defines_a_tool_where_there_are_no_others() -> None:
    turn = user(change("addition", type="tool_definition", definition=NEW))
    for tools in ({"tools": None}, {"tools": []}):
        use = request_of(messages=[USER, turn], **tools).to_chat().tool_use()
        assert ([tool.name for tool in use.tools], use.mode) == (["new"], "auto")
        assert shown(turn, **tools)[0][1].startswith("new can be called now: {")
    assert request_of(tools=None).to_chat().tools is None
