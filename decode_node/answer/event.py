"""Frames server-sent events."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: str = "") -> bytes:
    """Returns one event. `data` is JSON, which has no line breaks."""
    if name:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    return b"data: " + data + b"\n\n"
