"""Makes the strings of a JSON text valid where models write them nearly right.

    a line break, or another control character      \\n, \\u0001
    a backslash before what is no escape, \\d        \\\\d
    the escape of half a character, \\ud83d          \\ufffd

Everything else stays as it is. The text may come in pieces, wherever they are cut: an escape that
may go on in the next piece is kept back.
"""

from __future__ import annotations

import json
import re

_HEX = "[0-9a-fA-F]"
_ESCAPE = (
    rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}'
    rf"|u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
_VALID = rf'(?:[^"\\\x00-\x1f]++|{_ESCAPE}){{0,1000}}'
"""Matches the inside of a string, as far as it is valid. No more pieces at once: `re` keeps some
hundred bytes of each. (Possessive groups keep none, but Python before 3.11.5 matches more by them
than is there.)"""
_INSIDE = re.compile(_VALID)
_OUTSIDE = re.compile(rf'(?:[^"]++|"{_VALID}"){{0,1000}}')
"""These match what is valid already, in one go: a long text is read at the speed of a parser."""
_CONTROL = re.compile("[\x00-\x1f]+")
_NO_ESCAPES = re.compile(r'(?:\\[^u"\\/bfnrt\x00-\x1f][^"\\\x00-\x1f]*+){1,1000}')
_HALF = re.compile(rf"\\u[dD][89a-fA-F]{_HEX}{{2}}")
_OPEN = re.compile(rf"\\(?:u(?:{_HEX}{{0,3}}|[dD][89abAB]{_HEX}{{2}}(?:\\(?:u{_HEX}{{0,3}})?)?))?")
"""Matches what further text may make an escape."""


class ValidStrings:
    """Takes one JSON text, piece by piece."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._kept = ""

    def push(self, piece: str) -> str:
        """Returns the text so far, without what was returned before."""
        text, self._kept = self._kept + piece, ""
        found: list[str] = []
        at = 0
        while at < len(text):
            begin, at = at, _end_of_valid(text, at, _INSIDE if self._is_in_string else _OUTSIDE)
            found.append(text[begin:at])
            if at < len(text) and _OPEN.fullmatch(text, at):
                self._kept = text[at:]
                break
            if at < len(text):
                valid, at = self._repaired(text, at)
                found.append(valid)
        return "".join(found)

    def _repaired(self, text: str, at: int) -> tuple[str, int]:
        """Returns what is valid in place of what begins at `at`, and where the text goes on."""
        if text[at] == '"':
            self._is_in_string = not self._is_in_string
            return '"', at + 1
        if match := _CONTROL.match(text, at):
            return json.dumps(match[0])[1:-1], match.end()
        if match := _NO_ESCAPES.match(text, at):
            return match[0].replace("\\", "\\\\"), match.end()
        if match := _HALF.match(text, at):
            return "\\ufffd", match.end()
        return "\\\\", at + 1


def end_of_valid(text: str, at: int = 0) -> int:
    """Returns where the inside of a string, read from `at` on, ends or stops to be valid."""
    return _end_of_valid(text, at, _INSIDE)


def _end_of_valid(text: str, at: int, pattern: re.Pattern[str]) -> int:
    while (found := pattern.match(text, at)) and found.end() > at:
        at = found.end()
    return at


def with_valid_strings(text: str) -> str:
    """Returns a whole JSON text with valid strings. An escape that it ends amid is left out."""
    return ValidStrings().push(text)
