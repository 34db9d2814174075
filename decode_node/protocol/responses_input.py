"""Turns the input items of /v1/responses into the messages of a chat.

An assistant's turn may be several items: reasoning, a message, calls. They become one message, as
chat templates expect it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decode_node.protocol.other_chat import content_of, image_part
from edge.http.errors import BadRequest

Json = dict[str, Any]

Content = str | list[Json]
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_messages(instructions: str | None, items: str | list[Json]) -> list[Json]:
    """Returns the messages. Raises `BadRequest` for items that need state, or are neither text nor
    images."""
    messages = _Messages()
    if instructions:
        messages.add("system", instructions)
    if isinstance(items, str):
        messages.add("user", items)
        return messages.found
    for i, item in enumerate(items):
        messages.take(item, f"input.{i}")
    if not messages.found:
        raise BadRequest("input is empty", param="input")
    return messages.found


class _Messages:
    """Collects messages. The items of one turn of the assistant follow each other."""

    def __init__(self) -> None:
        self.found: list[Json] = []
        self._is_open = False
        """The last message is the assistant's, and more of its turn may come."""
        self._takes: dict[str, Callable[[Json, str], None]] = {
            "message": self._take_message,
            "function_call": self._take_call,
            "function_call_output": self._take_output,
            "reasoning": self._take_reasoning,
        }

    def add(self, role: str, content: Content | None, **fields: Any) -> None:
        self.found.append({"role": role, "content": content, **fields})
        self._is_open = False

    def take(self, item: Json, place: str) -> None:
        kind = "message" if item.get("type") is None else item["type"]
        take = self._takes.get(kind) if isinstance(kind, str) else None
        if take is None:
            raise BadRequest(
                f"{place}: items can be {', '.join(self._takes)}; nothing else is kept or run here",
                param=f"{place}.type",
            )
        take(item, place)

    def _take_message(self, item: Json, place: str) -> None:
        role = _text(item, "role", place)
        content = _content(item.get("content"), f"{place}.content")
        if role != "assistant":
            self.add(role, content)
            return
        _check_text(content, f"{place}.content")
        turn = self._turn()
        if turn["content"] is not None or "tool_calls" in turn:
            turn = self._turn(is_new=True)
        turn["content"] = content

    def _take_call(self, item: Json, place: str) -> None:
        function = {"name": _text(item, "name", place), "arguments": item.get("arguments")}
        call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _take_output(self, item: Json, place: str) -> None:
        output = _content(item.get("output"), f"{place}.output")
        self.add("tool", output, tool_call_id=_text(item, "call_id", place))

    def _take_reasoning(self, item: Json, place: str) -> None:
        name = "content" if item.get("content") else "summary"
        thought = _content(item.get(name) or "", f"{place}.{name}")
        _check_text(thought, f"{place}.{name}")
        turn = self._turn(is_new=True)
        if thought:
            turn["reasoning_content"] = thought

    def _turn(self, *, is_new: bool = False) -> Json:
        if is_new or not self._is_open:
            self.add("assistant", None)
            self._is_open = True
        return self.found[-1]


def _text(item: Json, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        place = f"{place}.{name}"
        raise BadRequest(f"{place} must be a string", param=place, code="invalid_type")
    return value


def _content(content: Any, place: str) -> Content:
    """Returns the text of a content, its parts a line each, or the parts if there are images.
    `place` is the field that holds it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be a string or a list", param=place)
    return content_of([_part(part, f"{place}.{i}") for i, part in enumerate(content)])


def _check_text(content: Content, place: str) -> None:
    if not isinstance(content, str):
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
