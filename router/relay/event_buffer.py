"""Cuts a stream of server-sent events at event boundaries, without looking inside the events."""

from __future__ import annotations

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_END = max(map(len, _EVENT_ENDS))
_MAX_HELD_BYTES = 1 << 20


class EventBuffer:
    """Holds back the unfinished end of a stream.

    The client then always has whole events: if the node's answer breaks off, an error event can
    follow what was sent. Nodes send an event in one piece, so as a rule nothing is held. An
    "event" beyond `max_held_bytes` is passed on as it comes.
    """

    def __init__(self, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Takes what arrived, returns the whole events so far (maybe none: b"")."""
        if not self._held and chunk.endswith(_EVENT_ENDS):
            return chunk
        held = self._held
        end = _end_of_last_event(held, chunk)
        if len(held) - end > self._max_held_bytes:
            end = len(held)
        events = bytes(held[:end])
        del held[:end]
        return events

    def rest(self) -> bytes:
        """Returns what was never finished, for a stream that ended in order."""
        held, self._held = bytes(self._held), bytearray()
        return held


def _end_of_last_event(held: bytearray, chunk: bytes) -> int:
    """Adds the chunk to what is held, which has no end of an event. Returns where the last event
    ends; 0: nowhere. Only what is new is looked at: a whole answer may be one event."""
    new = max(0, len(held) - _LONGEST_END + 1)
    held += chunk
    return max(at + len(end) if (at := held.rfind(end, new)) >= 0 else 0 for end in _EVENT_ENDS)
