"""Words of others, as they may stand in a message or a log line."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns a text that a file or a peer had a part in, with what terminals and readers of logs
    would act on written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
