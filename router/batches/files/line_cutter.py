"""Cuts what arrives into parts of whole lines."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.http.errors import RequestTooLarge
from router.store.files import FilePart

_PART_BYTES = 256 << 10


@dataclass(slots=True)
class LineCutter:
    """Takes bytes and gives parts, which joined are the same bytes. It holds a part, or the
    beginning of one long line."""

    max_line_bytes: int
    num_lines: int = 0
    _pending: bytearray = field(default_factory=bytearray)
    _end: int = 0
    """The place where the last whole line of `_pending` ends."""

    def feed(self, data: bytes) -> list[FilePart]:
        """Returns parts that are full. Raises `RequestTooLarge` for a line that is too long."""
        seen = len(self._pending)
        self._pending += data
        last = data.rfind(b"\n")
        if last >= 0:
            self._end = seen + last + 1
        if len(self._pending) - self._end > self.max_line_bytes:
            number = self.num_lines + self._pending.count(b"\n", 0, self._end) + 1
            raise RequestTooLarge(
                f"line {number} of the file is longer than {self.max_line_bytes} bytes",
                param="file",
            )
        return self._cut() if self._end >= _PART_BYTES else []

    def close(self) -> list[FilePart]:
        """Returns what is left. A last line may have no end."""
        self._end = len(self._pending)
        return self._cut() if self._pending else []

    def _cut(self) -> list[FilePart]:
        data = bytes(self._pending[: self._end])
        del self._pending[: self._end]
        self._end = 0
        num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
        part = FilePart(self.num_lines, num_lines, data)
        self.num_lines += num_lines
        return [part]
