"""Reads one line of a batch's file: a request, and the name that its client gave it.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.batches.errors import LineFault

_MAX_ID = 512
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_NOT_IN_BATCHES = ("stream", "background")
_IDLE_PRIORITY = (1 << 31) - 1
"""The lowest that nodes know: they count such requests apart in their reports."""

_Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class InputLine:
    """Is one request. `place` is the number of its line, from 0."""

    place: int
    custom_id: str
    model: str
    fields: dict[str, msgspec.Raw]

    @property
    def body(self) -> bytes:
        """Returns the body as a node gets it."""
        return msgspec.json.encode({**self.fields, "priority": _IDLE_PRIORITY})


class _Line(msgspec.Struct):
    """Has fields that may be missing: they are empty then."""

    custom_id: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    url: msgspec.Raw = msgspec.Raw(b"")
    body: msgspec.Raw = msgspec.Raw(b"")


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_text = msgspec.json.Decoder(str).decode


def read_line(text: bytes, place: int, endpoint: str) -> InputLine:
    """Reads it. Raises `LineFault`."""
    try:
        line = _decode_line(text)
    except _UNREADABLE:
        raise LineFault(
            "invalid_json_line", "This line is not parseable as valid JSON.", None
        ) from None
    custom_id = _text(line.custom_id, "custom_id")
    if not 0 < len(custom_id) <= _MAX_ID:
        raise LineFault(
            "invalid_value", f"custom_id must have 1 to {_MAX_ID} characters.", "custom_id"
        )
    method = _text(line.method, "method")
    if method != "POST":
        raise LineFault("invalid_method", "The method must be POST.", "method")
    if _text(line.url, "url") != endpoint:
        raise LineFault(
            "url_mismatch",
            f"The url of this line is not the endpoint of the batch, {endpoint}.",
            "url",
        )
    if not bytes(line.body):
        raise _missing("body")
    try:
        fields = _decode_fields(line.body)
        model = _decode_text(fields["model"]) if "model" in fields else ""
    except _UNREADABLE:
        raise LineFault(
            "invalid_value", "body must be an object, and its model a text.", "body"
        ) from None
    for name in _NOT_IN_BATCHES:
        if bytes(fields.get(name, b"")).strip() == b"true":
            raise LineFault(
                "unsupported_parameter", f"{name} is not supported in batches.", f"body.{name}"
            )
    return InputLine(place, custom_id, model, fields)


def _text(raw: msgspec.Raw, name: str) -> str:
    if not bytes(raw):
        raise _missing(name)
    try:
        return _decode_text(raw)
    except _UNREADABLE:
        raise LineFault("invalid_value", f"{name} must be a text.", name) from None


def _missing(name: str) -> LineFault:
    return LineFault("missing_required_parameter", f"Missing required parameter: {name}.", name)
