"""Reads all of a batch's file before any of it is answered.

A file with a mistake is refused as a whole: its batch ends as failed, and lists the first mistakes
with the numbers of their lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from edge.http.bodies.json_counter import JsonCounter
from edge.http.errors import BadRequest, HttpError
from router.batches.errors import LineFault
from router.batches.lines.input_line import InputLine, read_line
from router.request.model_route import ModelRoute
from router.store.files import FilePart

_MAX_FAULTS = 100
_DIGEST_BYTES = 16
_SHORT_LINE = 64 << 10

Fault = dict[str, object]


@dataclass(slots=True)
class Validation:
    """Takes a file's parts in order. `route` leads a model's name to what serves it, or raises."""

    endpoint: str
    max_requests: int
    route: Callable[[str], ModelRoute]
    num_lines: int = 0
    model: str = ""
    faults: list[Fault] = field(default_factory=list)
    _asked: str | None = None
    _ids: set[bytes] = field(default_factory=set)

    def take(self, part: FilePart) -> bool:
        """Returns whether it wants more."""
        for place, text in enumerate(lines_of(part), part.place):
            self.num_lines += 1
            if self.num_lines > self.max_requests:
                self._add(
                    LineFault("too_many_tasks", f"A batch may have {self.max_requests} requests."),
                    None,
                )
                return False
            try:
                _check_counts(text)
                self._check(read_line(text, place, self.endpoint))
            except LineFault as fault:
                self._add(fault, place + 1)
                if len(self.faults) >= _MAX_FAULTS:
                    return False
        return True

    def close(self) -> None:
        """Is called behind the last part."""
        if not self.num_lines:
            self._add(LineFault("empty_file", "The file has no requests."), None)

    def _check(self, line: InputLine) -> None:
        name = line.custom_id.encode("utf-8", "replace")
        digest = hashlib.blake2b(name, digest_size=_DIGEST_BYTES).digest()
        if digest in self._ids:
            raise LineFault(
                "duplicate_custom_id",
                f"The custom_id {line.custom_id[:64]!r} is that of an earlier line.",
                "custom_id",
            )
        self._ids.add(digest)
        if self._asked is None:
            self._asked = line.model
            try:
                self.model = self.route(line.model).version(digest)
            except HttpError as error:
                raise LineFault(
                    error.code or "invalid_value", error.message, "body.model"
                ) from None
        elif line.model != self._asked:
            raise LineFault(
                "model_mismatch",
                f"All lines of a batch name one model; the first one names {self._asked[:64]!r}.",
                "body.model",
            )

    def _add(self, fault: LineFault, line: int | None) -> None:
        self.faults.append(
            {"code": fault.code, "message": fault.message, "param": fault.param, "line": line}
        )


def _check_counts(text: bytes) -> None:
    """Raises `LineFault` for a line that holds more than a request may: reading it would hold up
    other requests, though it is read beside the event loop."""
    if len(text) <= _SHORT_LINE:
        return
    try:
        JsonCounter().feed(text)
    except BadRequest as error:
        raise LineFault("invalid_value", error.message, "body") from None


def lines_of(part: FilePart) -> list[bytes]:
    """Returns its lines without their ends."""
    lines = part.data.split(b"\n")
    return lines[: part.num_lines]
