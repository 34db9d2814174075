"""Counts what a JSON text holds before anything is built from it.

Bytes say little about work: eight megabytes of text are read in 2 ms, eight megabytes of `[[]],`
take a parser and a validator seconds, in which an event loop serves nothing else. So the text is
counted as it arrives, piece by piece, by a few searches of each piece that run at the speed of
memory. What is beyond a limit is refused before a parser sees it.

    piece ──without escapes──▶ split at quotes ──what is outside of strings──▶ , [ ] { } .

A text that is no JSON may be miscounted behind its first mistake, and no parser gets beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from edge.http.errors import BadRequest

MAX_VALUES = 1 << 20
"""A prompt of token ids may be a million long."""
MAX_LISTS_AND_OBJECTS = 1 << 15
MAX_STRINGS = 1 << 16
"""Names of fields are strings, too."""
MAX_FRACTIONS = 1 << 16
"""Numbers with a fraction or an exponent: reading one can take 0.5 µs. Trainers send the log
probabilities of all tokens that were drawn."""
MAX_LONG_NUMBERS = 1 << 12
"""Numbers of 25 digits or more, which no float needs: reading one can take 6 µs."""
MAX_DEPTH = 128

_PIECE_BYTES = 64 << 10
_NOT_BRACKETS = bytes(i for i in range(256) if i not in b"[]{}")
_LONG = b"0" * 25
_AS_DIGITS = bytes(ord("0") if i in b"0123456789." else ord(" ") for i in range(256))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(slots=True)
class JsonCounter:
    """Everything fed so far; `num_looks` is the number of pieces it took."""

    num_values: int = 1
    num_lists_and_objects: int = 0
    num_strings: int = 0
    num_fractions: int = 0
    num_long_numbers: int = 0
    depth: int = 0
    num_looks: int = 0
    _num_quotes: int = 0
    _is_in_string: bool = False
    _ends_in_escape: bool = False

    def feed(self, data: bytes) -> None:
        """Counts `data`. Raises `BadRequest` as soon as a limit is passed; it names the limit."""
        for start in range(0, len(data), _PIECE_BYTES):
            self._look(data[start : start + _PIECE_BYTES])

    def _look(self, piece: bytes) -> None:
        self.num_looks += 1
        piece = self._without_escapes(piece)
        self._num_quotes += piece.count(b'"')
        self.num_strings = (self._num_quotes + 1) // 2
        _check(self.num_strings, MAX_STRINGS, "strings and names")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        self._count(outside)

    def _without_escapes(self, piece: bytes) -> bytes:
        if self._ends_in_escape:
            piece = piece[1:]
            self._ends_in_escape = False
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._ends_in_escape = piece.endswith(b"\\")
        return piece

    def _count(self, outside: bytes) -> None:
        brackets = outside.translate(None, _NOT_BRACKETS)
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        self.num_values += outside.count(b",") + num_opened
        _check(self.num_values, MAX_VALUES, "values")
        self.num_lists_and_objects += num_opened
        _check(self.num_lists_and_objects, MAX_LISTS_AND_OBJECTS, "lists and objects")
        depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self.depth))
        _check(max(depths), MAX_DEPTH, "levels of nesting")
        if min(depths) < 0:
            fault = "the body is not valid JSON: it closes what it never opened"
            raise BadRequest(fault, code="invalid_json")
        self.depth = depths[-1]
        literals = outside.count(b"true") + outside.count(b"false")
        exponents = outside.count(b"e") + outside.count(b"E")
        self.num_fractions += outside.count(b".") + max(0, exponents - literals)
        _check(self.num_fractions, MAX_FRACTIONS, "numbers with a fraction or an exponent")
        self.num_long_numbers += outside.translate(_AS_DIGITS).count(_LONG)
        _check(self.num_long_numbers, MAX_LONG_NUMBERS, "numbers of 25 digits or more")


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise BadRequest(
            f"the JSON of the request has more than {limit} {what}; send less at once",
            code="request_too_complex",
        )
