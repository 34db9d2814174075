"""Reads JSON values out of a text that is still coming, and gives them verbatim.

Only the structure is looked at, brackets and strings: models write JSON that is nearly right, and
clients get what they wrote. A string ends at its quote alone, so braces, markers as text and marker
tokens inside of it belong to it; outside of a string a marker token ends everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from decode_node.parsers.text.text_input import Steps, TextInput

_MARKERS = "\ud800-\udfff"
_STRUCTURE = re.compile(f'["{{}}\\[\\]{_MARKERS}]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(f'[\\s,;"{{}}\\[\\]{_MARKERS}]')

Emit = Callable[[str], object]


def value(source: TextInput, emit: Emit) -> Steps[bool]:
    """Gives the next value to `emit`, piece by piece, and returns whether it is complete."""
    first = yield from source.peek()
    if first == '"':
        return (yield from _string(source, emit))
    if first in ("{", "["):
        return (yield from _nested(source, emit))
    return (yield from _scalar(source, emit))


def text(source: TextInput) -> Steps[str | None]:
    """Reads a string and returns what it stands for; None if it is none or not complete."""
    if (yield from source.peek()) != '"':
        return None
    parts: list[str] = []
    is_complete = yield from _string(source, parts.append)
    return decoded("".join(parts)) if is_complete else None


def decoded(literal: str) -> str | None:
    """Returns what a string literal stands for; None if it is none."""
    try:
        found = json.loads(literal, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _string(source: TextInput, emit: Emit) -> Steps[bool]:
    emit(source.take(source.at + 1))
    while True:
        at, stop = source.at, len(source.text)
        while match := _STRING_END.search(source.text, at):
            if match[0] == '"':
                emit(source.take(match.end()))
                return True
            at = match.end() + 1
        if at > stop and not source.is_end:
            stop -= 1  # a backslash, whose character has not come
        if stop > source.at:
            emit(source.take(stop))
        if source.is_end:
            return False
        yield


def _nested(source: TextInput, emit: Emit) -> Steps[bool]:
    depth = 0
    while True:
        at, text = source.at, source.text
        while match := _STRUCTURE.search(text, at):
            at, char = match.end(), match[0]
            if char == '"':
                if end := _closed_string(text, at):
                    at = end
                    continue
                at = match.start()
                if at > source.at:
                    emit(source.take(at))
                if not (yield from _string(source, emit)):
                    return False
                at, text = source.at, source.text
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if depth == 0:
                    emit(source.take(at))
                    return True
            else:
                if match.start() > source.at:
                    emit(source.take(match.start()))
                return False
        if len(text) > source.at:
            emit(source.take(len(text)))
        if source.is_end:
            return False
        yield


def _closed_string(text: str, at: int) -> int:
    """Returns the position behind the string that begins at `at`; 0 if its end has not come."""
    while match := _STRING_END.search(text, at):
        if match[0] == '"':
            return match.end()
        at = match.end() + 1
    return 0


def _scalar(source: TextInput, emit: Emit) -> Steps[bool]:
    """Reads a number, true, false or null: up to what cannot belong to it."""
    is_empty = True
    while True:
        match = _SCALAR_END.search(source.text, source.at)
        stop = match.start() if match else len(source.text)
        if stop > source.at:
            emit(source.take(stop))
            is_empty = False
        if match or source.is_end:
            return not is_empty
        yield
