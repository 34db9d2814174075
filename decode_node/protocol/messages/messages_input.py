"""Turns the turns of /v1/messages into the messages of a chat.

A turn of the user may hold results of tools: they become messages of their own, before what the
user says besides. A compaction stands for all that was before it.

Errors name a place as Anthropic's API does, with the kinds of blocks on the way to it
(`messages.5.content.0.tool_result.content.1.image`): by that name clients take an image or a
document that was refused out of the conversation, which could not go on otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from decode_node.protocol.chat.other_chat import content_of, image_part
from decode_node.protocol.messages.compaction import last_compaction
from decode_node.protocol.messages.message_texts import (
    is_unreadable,
    string,
    text_of,
    without_billing,
)
from decode_node.protocol.messages.tool_changes import CHANGES, REMOVAL, said
from edge.http.errors import BadRequest

Json = dict[str, Any]


def chat_messages(
    system: str | list[Json] | None,
    turns: list[Json],
    deferred: Mapping[str, Json],
    unsaid: Collection[str],
) -> tuple[list[Json], bool]:
    """Returns the messages, and whether the answer continues the last one. `deferred`: functions
    that turns introduce. `unsaid`: names of tools of which they say nothing. Raises
    `BadRequest`."""
    messages: list[Json] = []
    if system and (content := _system(system)):
        messages.append({"role": "system", "content": content})
    first, summary, rest = _compacted(turns)
    if summary is not None:
        messages.append({"role": "user", "content": summary})
        first += not rest
    reader = _Turns(deferred, unsaid)
    for i, turn in enumerate(turns[first:], first):
        place = f"messages.{i}"
        blocks = rest if rest and i == first else turn.get("content")
        messages += reader.messages(turn.get("role"), blocks, place)
    if not messages:
        raise BadRequest("messages say nothing", param="messages")
    last = messages[-1]
    return messages, last["role"] == "assistant" and "tool_calls" not in last


def left_out_blocks(turns: list[Json]) -> list[str]:
    """Returns the types of blocks that say nothing to the model here."""
    contents = (turn.get("content") for turn in turns)
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return [block["type"] for block in blocks if isinstance(block, dict) and is_unreadable(block)]


def _compacted(turns: list[Json]) -> tuple[int, str | None, list[Json] | None]:
    """Returns the turn with the last compaction, its text, and the blocks behind it; without one,
    the first turn and None."""
    if (found := last_compaction(turns)) is not None:
        i, j = found
        blocks = turns[i]["content"]
        return i, string(blocks[j], "content", f"messages.{i}.content.{j}"), blocks[j + 1 :]
    return 0, None, None


def _blocks(content: Any, place: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise BadRequest(f"{place} must be a string or a list of blocks", param=place)


class _Pieces:
    """Collects what a message holds. The template joins texts of the client; what is said here in
    place of another block stands on lines of its own."""

    def __init__(self) -> None:
        self._found: list[list[str] | Json] = []
        """Lines of a text, or what is none."""
        self._is_own = False
        """The last piece is the client's own words."""

    def add(self, block: Json, piece: str | Json) -> None:
        was_own, self._is_own = self._is_own, block.get("type") == "text"
        last = self._found[-1] if self._found else None
        if not isinstance(piece, str):
            self._found.append(piece)
        elif isinstance(last, list) and not (was_own and self._is_own):
            last.append(piece)
        else:
            self._found.append([piece])

    def mark_error(self) -> None:
        first = self._found[0] if self._found else None
        if isinstance(first, list):
            first[0] = f"Error: {first[0]}"
        else:
            self._found.insert(0, ["Error:"])

    def all(self) -> list[str | Json]:
        """Returns the texts, and what is none."""
        return ["\n".join(one) if isinstance(one, list) else one for one in self._found]


class _Turns:
    """Reads turns. `deferred`: functions that they introduce. `unsaid`: names of tools of which
    they say nothing."""

    def __init__(self, deferred: Mapping[str, Json], unsaid: Collection[str]) -> None:
        self._deferred = dict(deferred)
        self._unsaid = unsaid

    def messages(self, role: Any, content: Any, place: str) -> list[Json]:
        where = f"{place}.content"
        blocks = _blocks(content, where)
        if role == "assistant":
            return [self._of_assistant(blocks, where)]
        if role in ("user", "system"):
            return self._of_user(role, blocks, where)
        raise BadRequest(f"{place}.role must be user or assistant", param=f"{place}.role")

    def _of_user(self, role: str, blocks: list[Json], place: str) -> list[Json]:
        results, pieces = [], _Pieces()
        for i, block in enumerate(blocks):
            if block.get("type") == "tool_result":
                results.append(self._result(block, f"{place}.{i}"))
            else:
                self._add_piece(pieces, block, f"{place}.{i}")
        found = pieces.all()
        messages = [{"role": role, "content": content_of(found)}]
        is_unsaid = bool(blocks) and not found
        return results if is_unsaid else [*results, *messages]

    def _result(self, block: Json, place: str) -> Json:
        where = f"{place}.tool_result.content"
        blocks = _blocks(block.get("content") or "", where)
        pieces = _Pieces()
        for i, one in enumerate(blocks):
            self._add_piece(pieces, one, f"{where}.{i}")
        if block.get("is_error"):
            pieces.mark_error()
        name = string(block, "tool_use_id", place)
        return {"role": "tool", "tool_call_id": name, "content": content_of(pieces.all())}

    def _of_assistant(self, blocks: list[Json], place: str) -> Json:
        pieces, thoughts, calls = _Pieces(), [], []
        for i, block in enumerate(blocks):
            where, kind = f"{place}.{i}", block.get("type")
            if kind == "tool_use":
                calls.append(_call(block, where))
            elif kind == "thinking":
                thoughts.append(string(block, "thinking", where))
            elif not is_unreadable(block):
                text = self._text(block, where)
                if text or kind == "text":
                    pieces.add(block, text)
        found = pieces.all()
        message: Json = {"role": "assistant", "content": content_of(found) if found else None}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _text(self, block: Json, place: str) -> str:
        """Returns what a block says. The first that names a function has its definition."""
        if block.get("type") not in CHANGES:
            return text_of(block, place, self._deferred)
        text, name = said(block, place, self._deferred)
        if name in self._unsaid:
            return ""
        if block["type"] != REMOVAL:
            self._deferred.pop(name, None)
        return text

    def _add_piece(self, pieces: _Pieces, block: Json, place: str) -> None:
        """Adds what a block says, unless it changes a tool of which nothing is said."""
        piece = self._piece(block, place)
        if piece or block.get("type") not in CHANGES:
            pieces.add(block, piece)

    def _piece(self, block: Json, place: str) -> str | Json:
        """Returns a text, or an image as chats have it."""
        if block.get("type") != "image":
            return self._text(block, place)
        image = f"{place}.image"
        given, where = block.get("source"), f"{image}.source"
        source: Json = given if isinstance(given, dict) else {}
        match source.get("type"):
            case "base64":
                kind, data = string(source, "media_type", where), string(source, "data", where)
                return image_part(f"data:{kind};base64,{data}", image)
            case "url":
                return image_part(string(source, "url", where), image)
            case _:
                raise BadRequest(
                    f"{where}: images come as base64 or url; no files are kept here", param=where
                )


def _call(block: Json, place: str) -> Json:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": string(block, "name", place), "arguments": arguments}
    return {"id": string(block, "id", place), "type": "function", "function": function}


def _system(content: str | list[Json]) -> str | list[Json]:
    pieces = _Pieces()
    for i, block in enumerate(_blocks(content, "system")):
        text = text_of(block, f"system.{i}", {})
        kept = without_billing(text) if i == 0 else text
        if kept or kept == text:
            pieces.add(block, kept)
    return content_of(pieces.all())
