"""Words of others, as they may stand in a message or a log line."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Returns a text that a file or a peer had a part in, with what terminals and readers of logs
    would act on written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def listed(words: Sequence[str], most: int = 20, between: str = ", ") -> str:
    """Returns one line with the first `most` of them, and how many others there are: nodes and
    adapters may be thousands."""
    shown = between.join(words[:most])
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"
