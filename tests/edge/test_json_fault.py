"""Errors of bodies lead to the mistake: a client that cut text inside of a character is told so."""

from __future__ import annotations

import msgspec
import pytest

from edge.http.bodies.json_fault import json_fault

HALF = "half of a surrogate pair"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b'{"a": "b"', "truncated"),
        (b'{"a": "\xff"}', "UTF-8"),
        ('{"a": "é"}'.encode("utf-8-sig"), "byte order mark"),
        ('{"a": "é"}'.encode("utf-16"), "UTF-8"),
        (b'{"a": NaN}', "NaN (byte 6) is not JSON"),
        (b'{"NaN": [1, -Infinity]}', "Infinity (byte 13) is not JSON"),
        (b'{"a": [1e999, 1e9999]}', "too large for any float: 1e999;"),
        (b'{"1e999": -2.5E+400', "too large for any float: -2.5E+400;"),
        (b"[" + b"1" * 5000 + b", 1.0e310]", "1.0e310"),
        (b'{"a": None}', "invalid character"),
        (b"[" * 100_000, "nested too deeply"),
        (rb'{"a": "\ud83d"}', HALF),
        (rb'{"a": "\uD83D and \uDE00"}', HALF),
        (rb'{"a": "\uDe00"}', HALF),
        (rb'{"a": "\\\ud83d"}', HALF),
        (rb'{"a": "\ud83d\ude00"', "truncated"),
        (rb'{"a": "\\ud83d"', "truncated"),
        (rb'{"a": "' + b"x" * (1 << 18) + rb'\ud83d"}', "truncated"),
    ],
    ids=range(19),
)
def test_the_fault_of_a_body(body: bytes, words: str) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)) as caught:
        msgspec.json.decode(body)
    assert words in json_fault(body, caught.value)
