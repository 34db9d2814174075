"""Bounds what frames a body in chunks, while it is parsed.

chunks    each takes a call of the parser, however little is in it: a byte costs a thousand
          times what it does in a body by length. Each should bring `_LEAST_CHUNK` bytes;
          what is missing, of all chunks of a body, is `_SPARE_BYTES` at most
trailers  fields behind a body, of which nothing is used: as large as heads may be
"""

from __future__ import annotations

from edge.http.errors import BadRequest, HeadTooLarge, HttpError

_LEAST_CHUNK = 16
_SPARE_BYTES = 64 << 10


class BodyFraming:
    """Is of one connection's requests, one after the other. What is too much is returned as an
    error."""

    def __init__(self, max_trailer_bytes: int) -> None:
        self._max_trailer_bytes = max_trailer_bytes
        self._missing = 0
        self._num_trailer_bytes = 0
        self.has_begun = False
        """Whether what is parsed stands behind a head."""

    def begin_head(self) -> None:
        self.has_begun = False

    def begin_body(self) -> None:
        self.has_begun = True
        self._missing = self._num_trailer_bytes = 0

    def add_chunk(self) -> HttpError | None:
        """Counts the head of a chunk."""
        self._missing += _LEAST_CHUNK
        if self._missing <= _SPARE_BYTES:
            return None
        return BadRequest(
            f"the body comes in chunks of less than {_LEAST_CHUNK} bytes: send larger ones, or a "
            f"Content-Length",
            code="invalid_http",
        )

    def add_body(self, num_bytes: int) -> None:
        self._missing -= num_bytes

    def add_trailer(self, num_bytes: int) -> HttpError | None:
        """Counts a field behind the body."""
        self._num_trailer_bytes += num_bytes
        if self._num_trailer_bytes <= self._max_trailer_bytes:
            return None
        return HeadTooLarge(f"trailers are larger than {self._max_trailer_bytes} bytes")
