"""Forms the text of one choice from its tokens: as text, or as pieces for a parser.

1. `push` with each token that has text; `matched` says whether a stop string ended it
2. `end` once, unless one has: gives what was kept back
3. `take` at any time, and at the end: what became certain since
"""

from __future__ import annotations

from collections.abc import Collection

from engine.frontend.text.detokenizer import TokenJoiner
from engine.frontend.text.pieces import Piece, PieceQueue
from engine.frontend.text.stop_strings import StopStringMatcher, VisibleStops


class PlainText:
    """Gives text, in which stop strings match anywhere."""

    pieces: list[Piece] | None = None
    num_hidden = 0

    def __init__(self, detokenizer: TokenJoiner, matcher: StopStringMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._certain = ""

    @property
    def matched(self) -> str | None:
        return self._matcher.matched

    def push(self, token_id: int, *, may_stop: bool) -> None:
        """Takes a token. Without `may_stop` no stop string counts in its text."""
        text = self._detokenizer.push(token_id)
        self._certain += self._matcher.push(text) if may_stop else text

    def end(self, stop_token: int | None) -> None:
        """Takes the end. A stop string may still become complete in it."""
        self._certain += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()

    def take(self, *, is_end: bool) -> str:
        """Returns the text that became certain."""
        text, self._certain = self._certain, ""
        return text


class PieceText:
    """Gives pieces, and no text. Stop strings match in what is visible of them.

    Attributes:
        pieces: Those that became certain, since the last `take`.
    """

    def __init__(
        self, detokenizer: TokenJoiner, markers: Collection[int], stops: VisibleStops | None
    ) -> None:
        self._detokenizer = detokenizer
        self._markers = markers
        self._stops = stops
        self._queue = PieceQueue()
        self.pieces: list[Piece] | None = []

    @property
    def matched(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    @property
    def num_hidden(self) -> int:
        """Returns how many visible characters at the end of the pieces are behind a stop string."""
        return 0 if self._stops is None else self._stops.num_hidden

    def push(self, token_id: int, *, may_stop: bool) -> None:
        """Takes a token. A marker ends a character that is not complete."""
        if token_id not in self._markers:
            self._add(self._detokenizer.push(token_id), may_stop=may_stop)
            return
        if rest := self._detokenizer.flush():
            self._add(rest, may_stop=may_stop)
        self._detokenizer.push(token_id)
        self._add(token_id, may_stop=may_stop)

    def end(self, stop_token: int | None) -> None:
        """Takes the end; a stop token is a piece only as a marker."""
        if rest := self._detokenizer.flush():
            self._add(rest, may_stop=True)
        if stop_token in self._markers and stop_token is not None:
            self._add(stop_token, may_stop=True)
        if self._stops is not None and self._stops.matched is None:
            self._stops.finish()

    def take(self, *, is_end: bool) -> str:
        """Sets the pieces that became certain, and returns no text."""
        self.pieces = self._queue.take(is_end=is_end)
        return ""

    def _add(self, piece: Piece, *, may_stop: bool) -> None:
        if self._stops is None:
            self._queue.add(piece, 0, 0)
        elif self._stops.matched is None:
            self._queue.add(piece, *self._stops.add(piece, may_stop=may_stop))
