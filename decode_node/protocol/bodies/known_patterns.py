"""Regular expressions that the grammars' library has."""

from __future__ import annotations

import re

_NAMED = re.compile(r"\\(.)|\(\?<?[=!]", re.DOTALL)
"""Matches an escape, or the beginning of look-around."""
_UNKNOWN_ESCAPES = frozenset("123456789kbB")
"""Back references, and edges of words."""


def is_known_pattern(pattern: str) -> bool:
    """Says whether the library has all that a regular expression is made of."""
    return all(
        found[1] is not None and found[1] not in _UNKNOWN_ESCAPES
        for found in _NAMED.finditer(pattern)
    )
