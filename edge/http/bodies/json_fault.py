"""Says why a body is no JSON, in words that lead to the mistake."""

from __future__ import annotations

import codecs
import json
import math
import re
from contextlib import suppress

_MAX_CHARS = 200
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MAX_SEARCHED = 1 << 18
"""Bytes of the longest body that is searched, in about 10 ms, during which no stream goes on."""
_HALF = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u"
    rb"(?:d[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2}\\u)d[c-f][0-9a-f]{2})",
    re.IGNORECASE,
)
"""Matches the escape of half a surrogate pair: who cuts text between its UTF-16 units sends it, and
a parser says of it that the data were truncated."""

_TOO_LARGE = "out of range"
"""A parser says so of 1e999."""
_PLACE = re.compile(r"\(byte (\d+)\)")
_NO_NUMBER = re.compile(rb"NaN|Infinity")
"""Matches what Python and JavaScript write of numbers that JSON does not have."""
_MAX_DIGITS = 40


def json_fault(body: bytes, error: Exception) -> str:
    """Returns what is wrong with a body that raised `error` when it was decoded."""
    if not body:
        return "it is empty"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if body.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark; send UTF-8 without one"
    if isinstance(error, UnicodeDecodeError) or body.startswith(_UTF16):
        return "it is not UTF-8"
    if len(body) <= _MAX_SEARCHED and _HALF.search(body):
        return "a \\u escape is half of a surrogate pair, as if text was cut inside of a character"
    if (place := _PLACE.search(str(error))) and (found := _NO_NUMBER.match(body, int(place[1]))):
        return f"{found[0].decode()} (byte {place[1]}) is not JSON; send a finite number or null"
    if _TOO_LARGE in str(error):
        number = _infinite(body) if len(body) <= _MAX_SEARCHED else ""
        return f"a number is too large for any float{number}; send a smaller one or null"
    return str(error)[:_MAX_CHARS]


def _infinite(body: bytes) -> str:
    """Returns the first number that would be infinite, as it is written."""
    found: list[str] = []

    def keep(text: str) -> None:
        if not found and math.isinf(float(text)):
            found.append(text)

    with suppress(ValueError, RecursionError):  # what stands behind it may be no JSON
        json.loads(body, parse_float=keep, parse_int=lambda _: None)
    return f": {found[0][:_MAX_DIGITS]}" if found else ""
