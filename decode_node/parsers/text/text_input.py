"""The text that a parser reads, as far as it has come.

Parsers are generators that read like ordinary recursive-descent parsers over the whole text: where
the text is not there yet they `yield`, and go on with more of it, or at its end.

        text    {"name": "get_we│                        `feed`: "ather", "ar…
                                ▲ at: what is before was taken and is gone

A reader takes text as soon as it is sure of it, into a list where it has to collect, so what waits
here stays short, and the whole costs time linear in its length, whatever the cuts. Between `record`
and `forget` everything taken can be had back: a call that turns out to be none is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser that gives a `T` in the end. Each step needs more text."""

WHITE_SPACE = re.compile(r"\s*")


class MarkerSet:
    """Markers to look for: the first in the text counts. None may be the beginning of another."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.markers = tuple(dict.fromkeys(filter(None, markers)))
        self.pattern = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")
        self._begun = frozenset(m[:length] for m in self.markers for length in range(1, len(m)))
        self._firsts = frozenset(text for text in self._begun if len(text) == 1)
        self._max_held = max(map(len, self._begun), default=0)

    def num_held_back(self, text: str) -> int:
        """Returns the length of the longest end of `text` that may grow into a marker."""
        tail = text[-self._max_held :] if len(text) > self._max_held else text
        if self._firsts.isdisjoint(tail):
            return 0
        for at, char in enumerate(tail):
            if char in self._firsts and tail[at:] in self._begun:
                return len(tail) - at
        return 0


@lru_cache(maxsize=512)
def marker_set(*markers: str) -> MarkerSet:
    """Returns the set of markers of a format, which are the same for every answer."""
    return MarkerSet(markers)


class TextInput:
    """Text that has come and was not taken yet."""

    __slots__ = ("_record", "at", "is_end", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_end = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, stop: int) -> str:
        """Takes the text up to the position `stop`."""
        taken = self.text[self.at : stop]
        self.at = stop
        if self._record is not None:
            self._record.append(taken)
        return taken

    def feed_again(self, taken: str) -> None:
        """Gives back text that was taken last, however long ago."""
        self.text = taken + self.text[self.at :]
        self.at = 0

    def put_back(self, marker: str) -> None:
        """Gives back the marker that was taken last."""
        if marker:
            self.at -= len(marker)
            if self._record is not None:
                self._record.pop()

    def record(self, taken: str) -> None:
        """Begins to remember what is taken, with `taken` before it."""
        self._record = [taken]

    def forget(self) -> str:
        """Ends the record and returns it."""
        record, self._record = self._record or [], None
        return "".join(record)

    def peek(self) -> Steps[str]:
        """Returns the next character without taking it; "" at the end."""
        while self.at == len(self.text):
            if self.is_end:
                return ""
            yield
        return self.text[self.at]

    def skip_white_space(self) -> Steps[str]:
        """Takes white space and returns the next character, which stays; "" at the end."""
        while True:
            text, at = self.text, self.at
            if at < len(text) and not text[at].isspace():
                return text[at]
            match = WHITE_SPACE.match(text, at)
            assert match is not None
            if match.end() > at:
                self.take(match.end())
            if self.at < len(text):
                return text[self.at]
            if self.is_end:
                return ""
            yield

    def takes(self, literal: str) -> Steps[bool]:
        """Takes `literal` if it comes next."""
        while len(self.text) - self.at < len(literal):
            if self.is_end or not literal.startswith(self.text[self.at :]):
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.take(self.at + len(literal))
        return True

    def comes(self, literals: Sequence[str]) -> Steps[bool]:
        """Says whether one of the literals comes next, without taking it."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, literals))]
            if rest.startswith(tuple(literals)):
                return True
            if self.is_end or not any(literal.startswith(rest) for literal in literals):
                return False
            yield

    def until(self, markers: MarkerSet, emit: Callable[[str], object]) -> Steps[str]:
        """Gives text to `emit` up to the first marker, which is taken and returned; "" at the
        end."""
        while True:
            if match := markers.pattern.search(self.text, self.at):
                emit(self.take(match.start()))
                return self.take(match.end())
            waiting = self.text[self.at :] if self.at else self.text
            held = 0 if self.is_end else markers.num_held_back(waiting)
            if len(waiting) > held:
                emit(self.take(len(self.text) - held))
            if self.is_end:
                return ""
            yield

    def read(self, markers: MarkerSet, limit: int) -> Steps[tuple[str, str]]:
        """Returns (text, marker): the text before the first marker, both taken. The marker is ""
        if the end or more than `limit` characters came first; nothing of them is lost."""
        while True:
            if match := markers.pattern.search(self.text, self.at):
                if match.start() - self.at > limit:
                    return self.take(self.at + limit), ""
                return self.take(match.start()), self.take(match.end())
            if self.is_end or len(self.text) - self.at > limit + len(max(markers.markers, key=len)):
                return self.take(min(len(self.text), self.at + limit)), ""
            yield
