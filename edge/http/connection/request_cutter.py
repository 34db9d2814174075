"""Cuts what a client sends where its requests may end, so that no more of it is parsed than is due.

The parser takes all that it is given. A read may hold thousands of requests, each of which would
become work at once, and of which none could be dropped when the client has gone; and framing of a
byte for each byte of a body costs a thousand times what the body does. So the parser gets pieces:

    head            up to the blank line that ends it, or a part of it
    body by length  as much of it as is here, within what its reader looks at at once
    body in chunks  like a head: where chunks end, there is a blank line, too. One may also be in
                    the midst of a chunk: that is a cut too many, which does no harm
"""

from __future__ import annotations

from edge.http.connection.bounded_reads import LEAST_BYTES, ReadRoom

_PIECE_BYTES = LEAST_BYTES
_BODY_PIECE_BYTES = 32 << 10
_BLANK_LINE = b"\r\n\r\n"
_BEFORE = len(_BLANK_LINE) - 1


class RequestCutter:
    """Holds what came and was not parsed, and counts it in `room`. `body_bytes` are left of a body
    whose length is known."""

    def __init__(self, room: ReadRoom) -> None:
        self._room = room
        self.body_bytes = 0
        self._data = b""
        """Begins with some bytes in front of `_at`: a blank line may have come in parts."""
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def add(self, data: bytes) -> None:
        start = max(0, self._at - _BEFORE)
        self._at -= start
        self._keep(self._data[start:] + data)

    def next_piece(self) -> bytes:
        """Returns what may be parsed next, which ends no later than the request does."""
        start = self._at
        if self.body_bytes:
            end = min(start + self.body_bytes, start + _BODY_PIECE_BYTES, len(self._data))
            self.body_bytes -= end - start
        else:
            end = min(start + _PIECE_BYTES, len(self._data))
            blank = self._data.find(_BLANK_LINE, max(0, start - _BEFORE), end)
            if blank >= 0:
                end = blank + len(_BLANK_LINE)
        piece = self._data[start:end]
        self._at = end
        if not self:
            self._at = min(end, _BEFORE)
            self._keep(self._data[-_BEFORE:])
        return piece

    def drop(self) -> None:
        self._at = 0
        self._keep(b"")

    def _keep(self, data: bytes) -> None:
        self._room.num_held += len(data) - len(self._data)
        self._data = data
