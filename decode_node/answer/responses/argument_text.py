"""Reads the one text that the arguments of a call consist of, while they come.

    {"input": "*** Begin Patch\\n..."}   ──▶   *** Begin Patch ...

What is no object of that one text is given at the end, as it came: it is what the model meant to
say, and nothing here can tell which part of it.
"""

from __future__ import annotations

import json
import re

from decode_node.protocol.bodies.valid_strings import end_of_valid


class ArgumentText:
    """Takes the arguments of one call, whose strings are valid JSON. `name`: the argument."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = re.compile(rf'\s*\{{\s*"{re.escape(name)}"\s*:\s*"')
        self._text = ""
        """Arguments that were not given yet."""
        self._has_begun = False
        self._has_ended = False

    def push(self, piece: str) -> str:
        """Returns more of the text."""
        if self._has_ended:
            return ""
        self._text += piece
        if not self._has_begun:
            if (begin := self._begin.match(self._text)) is None:
                return ""
            self._has_begun, self._text = True, self._text[begin.end() :]
        end = end_of_valid(self._text)
        valid, self._text = self._text[:end], self._text[end:]
        self._has_ended = self._text.startswith('"')
        return str(json.loads(f'"{valid}"'))

    def finish(self) -> str:
        """Returns what is left at the end of the arguments."""
        if self._has_begun:
            return ""
        whole = _value(self._text, self._name)
        return self._text if whole is None else whole


def _value(text: str, name: str) -> str | None:
    """Returns the argument of whole arguments that have others in front of it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None
