"""Joins the messages of one answer: two of one kind in a row are two paragraphs."""

from __future__ import annotations

from collections.abc import Callable


class Paragraphs:
    """Knows the kind of the last message: `reasoning`, `content`, or "" for others."""

    def __init__(self) -> None:
        self.last = ""

    def next(self, kind: str, emit: Callable[[str], object]) -> Callable[[str], object]:
        """Returns what takes the next message's text, behind a line break if one of its kind was
        last."""
        is_first = True

        def give(text: str) -> None:
            nonlocal is_first
            if text and is_first:
                text = f"\n{text}" if self.last == kind else text
                is_first, self.last = False, kind
            emit(text)

        return give
