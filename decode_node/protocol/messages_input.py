"""Turns the turns of /v1/messages into the messages of a chat.

A turn of the user may hold results of tools: they become messages of their own, before what the
user says besides.
"""

from __future__ import annotations

import json
from typing import Any

from decode_node.protocol.other_chat import content_of, image_part
from edge.http.errors import BadRequest

Json = dict[str, Any]


def chat_messages(system: str | list[Json] | None, turns: list[Json]) -> tuple[list[Json], bool]:
    """Returns the messages, and whether the answer continues the last one. Raises `BadRequest`."""
    messages: list[Json] = []
    if system:
        messages.append({"role": "system", "content": _texts(system, "system")})
    for i, turn in enumerate(turns):
        place, role = f"messages.{i}", turn.get("role")
        blocks = _blocks(turn.get("content"), f"{place}.content")
        if role == "assistant":
            messages.append(_of_assistant(blocks, f"{place}.content"))
        elif role in ("user", "system"):
            messages += _of_user(role, blocks, f"{place}.content")
        else:
            raise BadRequest(f"{place}.role must be user or assistant", param=f"{place}.role")
    last = messages[-1]
    return messages, last["role"] == "assistant" and "tool_calls" not in last


def chat_tools(tools: list[Json]) -> list[Json]:
    """Returns tools as chats have them. Raises `BadRequest` for those that a server would run."""
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise BadRequest(
                f"tools.{i}: only tools that the client runs are supported; this server runs none",
                param=f"tools.{i}.type",
            )
        function: Json = {k: tool[k] for k in ("name", "description", "strict") if k in tool}
        if (schema := tool.get("input_schema")) is not None:
            if not isinstance(schema, dict):
                place = f"tools.{i}.input_schema"
                raise BadRequest(f"{place} must be an object", param=place, code="invalid_type")
            function["parameters"] = schema
        found.append({"type": "function", "function": function})
    return found


def _blocks(content: Any, place: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise BadRequest(f"{place} must be a string or a list of blocks", param=place)


def _of_user(role: str, blocks: list[Json], place: str) -> list[Json]:
    results, pieces = [], []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            results.append(_result(block, f"{place}.{i}"))
        else:
            pieces.append(_piece(block, f"{place}.{i}"))
    messages = [{"role": role, "content": content_of(pieces)}] if pieces or not results else []
    return [*results, *messages]


def _result(block: Json, place: str) -> Json:
    where = f"{place}.content"
    blocks = _blocks(block.get("content") or "", where)
    pieces = [_piece(one, f"{where}.{i}") for i, one in enumerate(blocks)]
    content = content_of(pieces)
    if block.get("is_error"):
        is_text = isinstance(content, str)
        content = f"Error: {content}" if is_text else content_of(["Error:", *pieces])
    name = _string(block, "tool_use_id", place)
    return {"role": "tool", "tool_call_id": name, "content": content}


def _of_assistant(blocks: list[Json], place: str) -> Json:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        where, kind = f"{place}.{i}", block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        else:
            texts.append(_text(block, where))
    message: Json = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Json, place: str) -> Json:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": _string(block, "name", place), "arguments": arguments}
    return {"id": _string(block, "id", place), "type": "function", "function": function}


def _texts(content: Any, place: str) -> str:
    blocks = _blocks(content, place)
    return "\n".join(_text(block, f"{place}.{i}") for i, block in enumerate(blocks))


def _piece(block: Json, place: str) -> str | Json:
    """Returns a text, or an image as chats have it."""
    if block.get("type") != "image":
        return _text(block, place)
    given, where = block.get("source"), f"{place}.source"
    source: Json = given if isinstance(given, dict) else {}
    match source.get("type"):
        case "base64":
            kind, data = _string(source, "media_type", where), _string(source, "data", where)
            return image_part(f"data:{kind};base64,{data}", place)
        case "url":
            return image_part(_string(source, "url", where), place)
        case _:
            raise BadRequest(
                f"{where}: images come as base64 or url; no files are kept here", param=where
            )


def _text(block: Json, place: str) -> str:
    if block.get("type") != "text":
        raise BadRequest(
            f"{place}.type: blocks can be text, image, tool_use, tool_result and thinking, in "
            "turns that have them; nothing else is supported",
            param=f"{place}.type",
        )
    return _string(block, "text", place)


def _string(block: Json, name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        place = f"{place}.{name}"
        raise BadRequest(f"{place} must be a string", param=place, code="invalid_type")
    return value
