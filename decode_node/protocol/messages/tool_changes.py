"""Reads what turns of /v1/messages change in the tools that the model may call.

    tool_reference   in a result: the client's own search has found a deferred tool
    tool_addition    a deferred tool, or one that is defined there, can be called from then on
    tool_removal     a tool can be called no more

The turn says so in words, with the definition of a tool that was not shown before, and the prompt
in front of it stays as it was. Where a turn defines a known name anew, only the last definition is
kept, which changes the prompt from its start; and so does a compaction that cut the turn off: its
tool is shown with the others then.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from decode_node.protocol.messages.compaction import last_compaction
from edge.http.errors import BadRequest

Json = dict[str, Any]

ADDITION = "tool_addition"
REMOVAL = "tool_removal"
REFERENCE = "tool_reference"
CHANGES = (REFERENCE, ADDITION, REMOVAL)
"""Types of blocks that say something of a tool."""
_DEFINITION = "tool_definition"


class Change(NamedTuple):
    """One change: a tool of this `name` can be called behind it, or not. `definition`: what it has
    of the tool. `place`: where the client wrote its name or its definition. `is_cut_off`: a
    compaction stands for it."""

    name: str
    is_there: bool
    place: str
    definition: Json | None = None
    is_cut_off: bool = False


def tool_changes(turns: list[Json]) -> Iterator[Change]:
    """Yields the changes in their order. Raises `BadRequest` for those of no tool."""
    compaction = last_compaction(turns) or (0, 0)
    for i, turn in enumerate(turns):
        content = turn.get("content")
        for j, block in enumerate(content if isinstance(content, list) else []):
            if isinstance(block, dict):
                is_cut_off = (i, j) < compaction
                for change in _changes(block, f"messages.{i}.content.{j}"):
                    yield change._replace(is_cut_off=is_cut_off)


def _changes(block: Json, place: str) -> Iterator[Change]:
    if block.get("type") in (ADDITION, REMOVAL):
        yield change_of(block, place)
    for one in _dicts(block.get("content")):
        if one.get("type") == REFERENCE:
            yield Change(str(one.get("tool_name")), is_there=True, place="")


def change_of(block: Json, place: str) -> Change:
    """Reads one block. Raises `BadRequest`."""
    is_added = block["type"] == ADDITION
    where = f"{place}.{block['type']}.tool"
    given = block.get("tool")
    tool: Json = given if isinstance(given, dict) else {}
    kind = tool.get("type")
    if kind == REFERENCE:
        where = f"{where}.name"
        return Change(_name(tool, where), is_added, where)
    definition = tool.get("definition")
    if is_added and kind == _DEFINITION and isinstance(definition, dict):
        where = f"{where}.definition"
        return Change(_name(definition, f"{where}.name"), is_added, where, definition)
    ways = f"{REFERENCE} or {_DEFINITION}" if is_added else REFERENCE
    raise BadRequest(f"{where} must be a {ways}; this server calls no other", param=where)


def said(block: Json, place: str, unshown: Mapping[str, Json]) -> tuple[str, str]:
    """Returns a change in words, and the tool's name. `unshown`: functions by name, of which the
    prompt says nothing yet. Raises `BadRequest`."""
    if block["type"] == REFERENCE:
        change = Change(_name(block, f"{place}.tool_name", "tool_name"), is_there=True, place=place)
    else:
        change = change_of(block, place)
    name = change.name
    if not change.is_there:
        return f"{name} can be called no more.", name
    if name not in unshown:
        return f"{name} can be called.", name
    function = json.dumps(unshown[name].get("function"), ensure_ascii=False)
    return f"{name} can be called now: {function}", name


def check_known(change: Change, names: Collection[str | None]) -> None:
    """Raises `BadRequest` for an addition or removal of a tool that was never defined."""
    if change.place and change.name not in names:
        raise BadRequest(
            f"{change.place}: tools has no {change.name!r}, and no turn before defines it",
            param=change.place,
        )


def _name(holder: Json, where: str, key: str = "name") -> str:
    name = holder.get(key)
    if not isinstance(name, str):
        raise BadRequest(f"{where} must be a string", param=where, code="invalid_type")
    return name


def _dicts(content: Any) -> list[Json]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []
