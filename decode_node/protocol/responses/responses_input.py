"""Turns the input items of /v1/responses into the messages of a chat.

An assistant's turn may be several items: reasoning, a message, calls. They become one message, as
chat templates expect it. Calls of all kinds become calls of the functions by which the model knows
those tools (`responses_tools.py`). Items of tools that another server ran are left out, and named:
only that server can read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from decode_node.protocol.chat.other_chat import content_of, image_part
from decode_node.protocol.responses.client_tools import TOOLS_BY_CALL, output_text
from decode_node.protocol.responses.compaction import (
    ITEM,
    REQUEST,
    TRIGGER,
    summary_of,
)
from decode_node.protocol.responses.responses_tools import ADDITIONAL, INPUT, flat_name
from decode_node.protocol.responses.tool_search import CALL, OUTPUT, TOOL, found_text, is_of_client
from edge.http.errors import BadRequest

Json = dict[str, Any]

Content = str | list[Json]
_OF_SERVERS = frozenset({
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "tool_search_call", "tool_search_output", "program", "program_output",
})  # fmt: skip
SETTINGS = "configuration_update"
"""The type of an item that changes how the answers from there on are made."""
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def left_out_items(items: str | list[Json]) -> list[str]:
    """Returns the types of items that say nothing to the model here."""
    left_out = [] if isinstance(items, str) else [one for one in items if not is_of_client(one)]
    kinds = [item.get("type") for item in left_out]
    found = [kind for kind in kinds if isinstance(kind, str) and kind in _OF_SERVERS]
    return found + [ITEM for item in left_out if item.get("type") == ITEM and not summary_of(item)]


def chat_messages(
    instructions: str | None,
    items: str | list[Json],
    found: Mapping[int, list[Json]],
    *,
    asks_summary: bool = False,
) -> list[Json]:
    """Returns the messages. `found`: functions that searches have found, by the number of the item;
    `asks_summary`: the last message asks to sum up what is before it. Raises `BadRequest` for items
    that need state, or are neither text nor images."""
    messages = _Messages()
    if instructions:
        messages.add("system", instructions)
    if isinstance(items, str):
        messages.add("user", items)
    for i, item in enumerate([] if isinstance(items, str) else items):
        if item.get("type") == OUTPUT and is_of_client(item):
            messages.take_search_output(item, f"input.{i}", found[i])
        else:
            messages.take(item, f"input.{i}")
    if not messages.found:
        raise BadRequest("input is empty", param="input")
    if asks_summary:
        messages.add("user", REQUEST)
    return messages.found


class _Messages:
    """Collects messages. The items of one turn of the assistant follow each other."""

    def __init__(self) -> None:
        self.found: list[Json] = []
        self._is_open = False
        """The last message is the assistant's, and more of its turn may come."""
        self._known: dict[str, str] = {}
        """The items' own ids, with the ids of their calls."""
        self._takes: dict[str, Callable[[Json, str], None]] = {
            "message": self._take_message,
            "function_call": self._take_call,
            "function_call_output": self._take_output,
            "reasoning": self._take_reasoning,
            "custom_tool_call": self._take_custom_call,
            "custom_tool_call_output": self._take_output,
            "item_reference": self._take_reference,
            ITEM: self._take_summary,
            **dict.fromkeys(TOOLS_BY_CALL, self._take_client_call),
            **{f"{kind}_output": self._take_client_output for kind in TOOLS_BY_CALL},
        }

    def add(self, role: str, content: Content | None, **fields: Any) -> None:
        self.found.append({"role": role, "content": content, **fields})
        self._is_open = False

    def take(self, item: Json, place: str) -> None:
        kind = "message" if item.get("type") is None else item["type"]
        # What is no text may be no key either.
        kind = kind if isinstance(kind, str) else ""
        take = self._takes.get(kind)
        if kind == CALL and is_of_client(item):
            take = self._take_search
        if isinstance(item.get("id"), str) and kind != "item_reference":
            self._known.setdefault(item["id"], str(item.get("call_id")))
        if kind in (ADDITIONAL, SETTINGS, TRIGGER) or (take is None and kind in _OF_SERVERS):
            return
        if take is None:
            kinds = ", ".join((*self._takes, TRIGGER, ADDITIONAL, SETTINGS))
            raise BadRequest(
                f"{place}: items can be {kinds}; nothing else is kept or run here",
                param=f"{place}.type",
            )
        take(item, place)

    def take_search_output(self, item: Json, place: str, found: list[Json]) -> None:
        self.add("tool", found_text(found), tool_call_id=_text(item, "call_id", place))

    def _take_search(self, item: Json, place: str) -> None:
        self._add_call(item, place, TOOL, item.get("arguments"))

    def _take_message(self, item: Json, place: str) -> None:
        role = _text(item, "role", place)
        content = _content(item.get("content"), f"{place}.content")
        if role != "assistant":
            self.add(role, content)
            return
        _check_text(content, f"{place}.content")
        # Clients send what was said beside calls in front of them, or behind them.
        turn = self._turn()
        if turn["content"] is not None:
            turn = self._turn(is_new=True)
        turn["content"] = content

    def _take_call(self, item: Json, place: str) -> None:
        self._add_call(item, place, _flat_name(item, place), item.get("arguments"))

    def _take_custom_call(self, item: Json, place: str) -> None:
        arguments = {INPUT: _text(item, "input", place)}
        self._add_call(item, place, _flat_name(item, place), arguments)

    def _take_client_call(self, item: Json, place: str) -> None:
        tool = TOOLS_BY_CALL[item["type"]]
        if (arguments := tool.arguments(item)) is None:
            where = f"{place}.{tool.place}"
            raise BadRequest(f"{where} must be an object", param=where, code="invalid_type")
        self._add_call(item, place, tool.name, arguments)

    def _add_call(self, item: Json, place: str, name: str, arguments: str | Json | None) -> None:
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": arguments}
        call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _take_output(self, item: Json, place: str) -> None:
        output = _content(item.get("output"), f"{place}.output")
        self.add("tool", output, tool_call_id=_text(item, "call_id", place))

    def _take_client_output(self, item: Json, place: str) -> None:
        """Takes the result of a `local_shell_call`, which may name the item in place of its call,
        of a `shell_call`, or of an `apply_patch_call`, which need not say more than its status."""
        name = self._known.get(str(item.get("id"))) if item.get("call_id") is None else None
        call_id = name or _text(item, "call_id", place)
        output = item.get("output")
        if output is None and isinstance(item.get("status"), str):
            output = item["status"]
        if item["type"] == "shell_call_output" and (told := output_text(output)) is not None:
            output = told
        self.add("tool", _content(output, f"{place}.output"), tool_call_id=call_id)

    def _take_reference(self, item: Json, place: str) -> None:
        """Takes the name of an item: of one before it, which is there already."""
        if _text(item, "id", place) not in self._known:
            raise BadRequest(
                f"{place}: no item of the input before has this id, and nothing is kept between "
                "requests here; send the item itself, as clients do with store false, or ask a "
                "router with --response-store",
                param=f"{place}.id",
            )

    def _take_summary(self, item: Json, place: str) -> None:
        _text(item, "encrypted_content", place)
        if (summary := summary_of(item)) is not None:
            self.add("user", summary)

    def _take_reasoning(self, item: Json, place: str) -> None:
        name = "content" if item.get("content") else "summary"
        thought = _content(item.get(name) or "", f"{place}.{name}")
        _check_text(thought, f"{place}.{name}")
        turn = self._turn(is_new=True)
        if thought:
            texts = [thought] if isinstance(thought, str) else [part["text"] for part in thought]
            turn["reasoning_content"] = "\n".join(texts)

    def _turn(self, *, is_new: bool = False) -> Json:
        if is_new or not self._is_open:
            self.add("assistant", None)
            self._is_open = True
        return self.found[-1]


def _flat_name(item: Json, place: str) -> str:
    return flat_name(item.get("namespace"), _text(item, "name", place))


def _text(item: Json, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        place = f"{place}.{name}"
        raise BadRequest(f"{place} must be a string", param=place, code="invalid_type")
    return value


def _content(content: Any, place: str) -> Content:
    """Returns the text of a content, or its parts if there are several or images. `place` is the
    field that holds it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be a string or a list", param=place)
    return content_of([_part(part, f"{place}.{i}") for i, part in enumerate(content)])


def _check_text(content: Content, place: str) -> None:
    if not isinstance(content, str) and any(part["type"] != "text" for part in content):
        raise BadRequest(f"{place}: what a model said has no images", param=place)


def _part(part: Any, place: str) -> str | Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        return _text(part, "text", place)
    if kind == "refusal":
        return _text(part, "refusal", place)
    if kind != "input_image":
        raise BadRequest(f"{place}: only text and images are supported", param=place)
    if part.get("file_id") is not None:
        place = f"{place}.file_id"
        raise BadRequest(f"{place}: no files are kept here; send image_url", param=place)
    return image_part(_text(part, "image_url", place), place)
