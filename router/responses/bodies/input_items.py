"""The items of a request: as nodes get them, as they are kept, and as the API lists them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from edge.http.errors import BadRequest
from router.request.first_items import reader_of_first
from router.responses.bodies.json_fields import UNREADABLE, encode
from router.responses.bodies.state_fields import NAME
from router.store.items import Item

_ID_DIGITS = 16
_MAX_ITEMS = 4096
"""Items that nodes take."""
_REFERENCE = "item_reference"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}


class _Head(msgspec.Struct):
    type: msgspec.Raw = msgspec.Raw(b"")
    id: msgspec.Raw = msgspec.Raw(b"")


_read_items = reader_of_first(_MAX_ITEMS + 1, msgspec.Raw)
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_text = msgspec.json.Decoder(str).decode


def new_id(prefix: str) -> str:
    """Returns an id that nothing can guess."""
    return f"{prefix}_{secrets.token_hex(_ID_DIGITS)}"


def items_of_input(given: bytes | None, place: str = "input") -> list[Item]:
    """Returns the items of the field `input`, or of one like it, of which a text is one. Raises
    `BadRequest` for what is neither, and for more items than nodes take."""
    if given is None or given.strip() == b"null":
        return []
    try:
        if given.lstrip()[:1] == b'"':
            _decode_text(given)
            values = [b'{"role":"user","content":' + given.strip() + b"}"]
        else:
            values = [bytes(raw) for raw in _read_items(given)]
    except UNREADABLE:
        raise BadRequest(
            f"{place} must be a text or a list of items", param=place, code="invalid_type"
        ) from None
    if len(values) > _MAX_ITEMS:
        raise BadRequest(f"{place} has more than {_MAX_ITEMS} items", param=place)
    return [item_of(value, f"{place}.{i}") for i, value in enumerate(values)]


def item_of(data: bytes, place: str = "", *, is_output: bool = False) -> Item:
    """Returns an item with its own id, or a new one. Raises `BadRequest` for what is no object."""
    try:
        head = _decode_head(data)
    except UNREADABLE:
        raise BadRequest(f"{place} must be an object", param=place, code="invalid_type") from None
    kind = _text(head.type) or "message"
    name = _text(head.id)
    if kind == _REFERENCE or not NAME.fullmatch(name):
        name = name if kind == _REFERENCE else new_id(_PREFIXES.get(kind, "item"))
    return Item(name, data, is_output)


def is_reference(item: Item) -> bool:
    """Says whether an item only names another one."""
    return _text(_decode_head(item.data).type) == _REFERENCE


def references(items: Iterable[Item]) -> list[str]:
    """Returns the ids of items that are meant and not there."""
    own = {item.id for item in items if not is_reference(item)}
    named = {item.id for item in items if is_reference(item)}
    return sorted(name for name in named - own if NAME.fullmatch(name))


def resolved(items: Sequence[Item], known: dict[str, Item], history: set[str]) -> list[Item]:
    """Returns the items with those that they name in their places. What the history has is there
    already. Raises `BadRequest` for what nothing knows."""
    found: list[Item] = []
    own = {item.id for item in items if not is_reference(item)}
    for i, item in enumerate(items):
        if not is_reference(item):
            found.append(item)
        elif item.id in known and item.id not in history | own:
            found.append(Item(item.id, known[item.id].data))
        elif item.id not in history | own:
            raise BadRequest(
                f"input.{i}: no item with this id is kept; send the item itself",
                param=f"input.{i}.id",
                code="item_not_found",
            )
    return found


def listed(item: Item) -> dict[str, Any]:
    """Returns an item as the API lists it: with an id and a type, and content as parts."""
    fields: dict[str, Any] = msgspec.json.decode(item.data)
    fields = {"id": item.id, "type": "message", **fields}
    fields["id"] = item.id
    if fields["type"] == "message":
        fields.setdefault("status", "completed")
        content = fields.get("content")
        if isinstance(content, str):
            fields["content"] = [_part(content, fields.get("role") == "assistant")]
    return fields


def page_document(items: Sequence[Item], has_more: bool) -> bytes:
    """Returns a list as the API has it."""
    ids = [item.id for item in items]
    return encode({
        "object": "list",
        "data": [listed(item) for item in items],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    })  # fmt: skip


def _part(text: str, is_of_model: bool) -> dict[str, Any]:
    if is_of_model:
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _text(raw: msgspec.Raw) -> str:
    """Returns "" for what is no text."""
    try:
        return _decode_text(raw)
    except UNREADABLE:
        return ""
