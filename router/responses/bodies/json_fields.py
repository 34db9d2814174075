"""Reads and changes JSON objects of which only a few fields matter; the others stay as they are,
byte for byte."""

from __future__ import annotations

from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]

_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
encode = msgspec.json.encode

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def fields_of(data: bytes) -> Fields:
    """Returns the fields of an object. Raises `UNREADABLE`."""
    return _decode_fields(data)


def list_of(data: bytes) -> list[bytes]:
    """Returns the values of a list. Raises `UNREADABLE`."""
    return [bytes(raw) for raw in _decode_list(data)]


def raw_list(values: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(values) + b"]")


def value_of(fields: Fields, name: str) -> Any:
    """Returns a field's value; None where it is missing. Raises `UNREADABLE`."""
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def with_fields(data: bytes, **changes: Any) -> bytes:
    """Returns an object with other values for some of its fields. Those that it has keep their
    places."""
    return encode({**fields_of(data), **changes})
