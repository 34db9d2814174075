"""Turns llguidance's messages into words for clients, without the grammar that they quote."""

from __future__ import annotations

import re

from edge.printable import printable

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_SCHEMA = "failed to compile JSON schema: "
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")
_IN_REGEX = re.compile(r"(?:lookarounds not supported yet|^error: (?P<reason>.*))", re.MULTILINE)
_EMPTY_REGEX = re.compile(r"Regex is empty:.*")
_LONGEST = 300
_PANIC = (
    "the grammar library failed at it; check the schema or the grammar for values of wrong types"
)
_ONE_OF = (
    "the keyword oneOf is only supported where no document can match two of its options; use anyOf"
)


def in_plain_words(message: str) -> str:
    """Returns what is wrong with a grammar, in one line; "" for no message."""
    return printable(_in_plain_words(message))[:_LONGEST]


def _in_plain_words(message: str) -> str:
    message = message.replace("<non-verbose/>", "").strip()
    if message.startswith("panic:"):
        return _PANIC
    if "regex parse error" in message or "(in regex)" in message:
        found = _IN_REGEX.search(message)
        reason = found and found["reason"]
        return f"a regular expression cannot be used: {reason or 'look-around is not supported'}"
    message = _PLACE.sub("", message).removeprefix(_SCHEMA).partition("\n")[0]
    if found := _KEYS.search(message):
        names = found[1].replace('"', "")
        many = "," in names
        return f"the keyword{'s' * many} {names} {'are' if many else 'is'} not supported"
    if found := _FORMAT.search(message):
        return f"the format {found[1]} is not supported"
    if "oneOf constraints are not supported" in message:
        return _ONE_OF
    if message.startswith("unknown special token"):
        message = message.partition(";")[0]
    return _EMPTY_REGEX.sub("no text matches its patterns", message)
