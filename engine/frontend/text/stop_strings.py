"""Finds stop strings in the text of one answer.

`StopStringMatcher` keeps back text that may turn out to be the beginning of a stop string, and
gives the same text however it arrives: a token at a time, in groups, or all at once.

`VisibleStops` does the same for answers that a parser reads, on what a client sees of them alone.
Headers and markers are no text, and a parser may make a piece's text certain only with a later one:

    pieces     <|channel|>  final  <|message|>  It  ' rains'
    visible                                     It  ' rains'
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.frontend.text.pieces import Piece
from engine.frontend.text.visible_text import Stretch, VisibleText


class StopStringMatcher:
    """Cuts text before the first stop string that becomes complete, or behind it (`keeps_match`).

    If two become complete with the same character, the longer one counts. `matched` names it;
    after that nothing more is given.
    """

    def __init__(self, stop: tuple[str, ...], *, keeps_match: bool = False) -> None:
        self._stop = tuple(sorted(stop, key=len, reverse=True))
        self._keeps_match = keeps_match
        self._kept = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes text and returns what is certainly no part of a stop string."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        text = self._kept + text
        if cut := self._find(text):
            start, self.matched = cut
            self._kept = ""
            return text[: start + len(self.matched)] if self._keeps_match else text[:start]
        keep = self._num_to_keep(text)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns what was kept back: no more text will come."""
        kept, self._kept = self._kept, ""
        return kept

    def _find(self, text: str) -> tuple[int, str] | None:
        """Returns (start, stop string) of the one that ends first."""
        found = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if not found:
            return None
        _, start, stop = min(found, key=lambda match: match[:2])
        return start, stop

    def _num_to_keep(self, text: str) -> int:
        """Returns the length of the longest end of `text` with which a stop string begins."""
        longest = min(len(self._stop[0]) - 1, len(text))
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class VisibleStops:
    """Follows one choice. `add` and `finish` return how many characters are certain to be seen.

    Attributes:
        matched: The stop string that ended the answer, or None.
        num_hidden: Then, how many characters that the pieces so far make visible come behind the
            end.
    """

    def __init__(self, text: VisibleText, stop: tuple[str, ...], *, keeps_match: bool) -> None:
        self._text = text
        self._stop = stop
        self._keeps_match = keeps_match
        self._matcher = StopStringMatcher(stop, keeps_match=keeps_match)
        self._part = ""
        self._num_kept = 0
        """Characters that the matcher keeps back."""
        self.matched: str | None = None
        self.num_hidden = 0

    def add(self, piece: Piece, *, may_stop: bool) -> tuple[int, int]:
        """Takes a piece and returns (characters that it makes visible, characters that became
        certain). Without `may_stop` no stop string counts in them."""
        found = self._text.push(piece)
        num_certain = self._take(found, may_stop=may_stop)
        if self.matched is not None:
            self.num_hidden += _length(self._text.finish())
        return _length(found), num_certain

    def finish(self) -> tuple[int, int]:
        """Ends the answer and returns the same, of what was kept back."""
        found = self._text.finish()
        num_certain = self._take(found, may_stop=True)
        if self.matched is None:
            num_certain += self._flush()
        return _length(found), num_certain

    def _take(self, stretches: Sequence[Stretch], *, may_stop: bool) -> int:
        num_certain = 0
        for part, text, counts in stretches:
            if self.matched is not None:
                self.num_hidden += len(text)
                continue
            if part != self._part:
                num_certain += self._flush()
                self._part = part
            if counts and may_stop:
                num_certain += self._match(text)
            else:
                num_certain += len(text) + self._flush()
        return num_certain

    def _match(self, text: str) -> int:
        num_certain = len(self._matcher.push(text))
        self._num_kept += len(text) - num_certain
        if self._matcher.matched is not None:
            self.matched, self.num_hidden = self._matcher.matched, self._num_kept
        return num_certain

    def _flush(self) -> int:
        """Begins anew, and returns the length of what was kept back."""
        num_kept, self._num_kept = self._num_kept, 0
        self._matcher.flush()
        return num_kept


def _length(stretches: Sequence[Stretch]) -> int:
    return sum(len(stretch.text) for stretch in stretches)
