"""Frames server-sent events."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: str = "") -> bytes:
    """Returns one event. `data` is JSON, which has no line breaks."""
    if name:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    return b"data: " + data + b"\n\n"


_PLACE = "\0text\0"
"""Stands where the text goes; nothing else in an answer holds a NUL."""
_encode = msgspec.json.Encoder().encode
_JSON_PLACE = _encode(_PLACE)


class TextEvent:
    """Makes the same event again and again, with another text each time: nearly all events of an
    answer differ in nothing else. `make` forms the event of a text."""

    __slots__ = ("_parts",)

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._parts = make(_PLACE).split(_JSON_PLACE)

    def of(self, text: str) -> bytes:
        return _encode(text).join(self._parts)
