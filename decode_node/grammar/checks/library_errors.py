"""Turns llguidance's messages into words for clients, without the grammar that they quote."""

from __future__ import annotations

import re

from edge.printable import printable

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_SCHEMA = "failed to compile JSON schema: "
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")
_IN_REGEX = re.compile(r"(?:lookarounds not supported yet|^error: (?P<reason>.*))", re.MULTILINE)
_SAID = [
    (
        r"NoExtension(Bias)?",
        "no text can follow it, as where a $ref or a rule leads only back to itself",
    ),
    (r"Regex is empty:.*", "no text matches its patterns"),
    (r"Invalid type: (.*)", r"\1 is no type of a JSON schema"),
    (
        r"schema must be an object or boolean",
        "a schema within it is neither an object nor a boolean",
    ),
    (r"Pointer '(.*)' does not exist", r"a $ref names \1, which is not in the schema"),
    (r"Expected (.*) for '(.*)', got (.*)", r"\2: \1 expected, not \3"),
    (r"Resource '(.*)' is not present .*", r"\1 is named, and no other document is read"),
    (r"Value for '(.*)' has too many digits: .*", r"\1 has too many digits"),
    (
        r"Failed to generate regex for (?:integer|float) range: .*",
        "minimum or maximum is too large, or no number lies between them",
    ),
    (
        r"Unsatisfiable schema: anyOf is empty",
        "no document follows it: enum or anyOf has no option",
    ),
    (
        r"Unsatisfiable schema: schema is false",
        "no document follows it: a schema within it is false",
    ),
    (
        r"Unsatisfiable schema: required property (.*) is unsatisfiable",
        r"no document follows it: the property \1 is required, and can have no value",
    ),
    (
        r"fuel exhausted when checking relevance of lexemes.*",
        "its numbers, texts or patterns take too long to be told apart",
    ),
    (r"Unsatisfiable schema: (.*)", r"no document follows it: \1"),
]
_WORDS = [(re.compile(said), words) for said, words in _SAID]
"""Pairs what the library says of a schema with what clients get."""
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
    for said, words in _WORDS:
        if said.fullmatch(message):
            return said.sub(words, message)
    return message
