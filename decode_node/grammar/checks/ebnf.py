"""Writes EBNF so that the library's converter reads it as llama.cpp and xgrammar do.

\\u0041  \\U00000041      \\x41: of an escape's digits it drops the zeros in front, and what is
                        left, like `\\ue9`, is none any more
\\u00e9  \\U0001f600      the character
a line that begins with |, behind comments or not        the end of the line before
.                       any character, line breaks among them
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_SURROGATES = range(0xD800, 0xE000)
_LAST = 0x10FFFF
_TEXTS = r'"[^"\\]*+(?:\\.[^"\\]*+)*"?|\[[^\]\\]*+(?:\\.[^\]\\]*+)*\]?'
"""Matches texts and classes of characters, in which nothing else has a meaning."""
_COMMENT = re.compile(rf"(?P<text>{_TEXTS})|#[^\r\n]*+", re.DOTALL)
_SYNTAX = re.compile(rf"(?P<text>{_TEXTS})|(?P<dot>\.)|\s++", re.DOTALL)


def with_plain_syntax(ebnf: str) -> str:
    """Returns a grammar that means the same. An escape of no character stays as it is."""
    plain = _ESCAPE.sub(_character, ebnf)
    bare = _COMMENT.sub(lambda found: found["text"] or "", plain)
    return _SYNTAX.sub(_part, bare)


def _character(found: re.Match[str]) -> str:
    digits = found[1] or found[2]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return found[0] if code in _SURROGATES or code > _LAST else chr(code)


def _part(found: re.Match[str]) -> str:
    if found["dot"]:
        return '(. | "\\n")'
    if found["text"]:
        return found["text"]
    return " " if found.string.startswith("|", found.end()) else found[0]
