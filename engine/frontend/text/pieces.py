"""Pieces: the output of one request as its parser reads it.

A model marks a tool call, or the end of its thinking, with tokens of their own. In text they can no
longer be distinguished from a quotation that spells the same, so a request may name *marker tokens*
(`GenerationRequest.marker_token_ids`), and its outputs then carry pieces besides the text:

    tokens    "I'll"  " look"  <tool_call>  "\\n{"   ...
    pieces    "I'll"  " look"  151657       "\\n{"   ...

One piece for each token, in order: its id for a marker token, and for every other one the text
that it completes, which is empty in the middle of a character. A character that stays incomplete
is a piece more; a stop token has one only if it is a marker. An output may have fewer pieces than
tokens: those whose visible text may be part of a stop string are kept back.
"""

from __future__ import annotations

from collections import deque

Piece = str | int
"""Text, or the id of a marker token."""


class PieceQueue:
    """Keeps pieces back until the visible text that came with them is certain."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Piece, int]] = deque()
        """Pieces, each with the characters that it makes visible."""
        self._num_certain = 0
        """Characters of the waiting pieces that are certain."""

    def add(self, piece: Piece, num_visible: int, num_certain: int) -> None:
        """Appends a piece that makes this many characters visible. With it, this many characters of
        all became certain."""
        self._waiting.append((piece, num_visible))
        self._num_certain += num_certain

    def take(self, *, is_end: bool) -> list[Piece]:
        """Returns the pieces that became certain; at the end, all."""
        waiting, taken = self._waiting, list[Piece]()
        while waiting and (is_end or waiting[0][1] <= self._num_certain):
            piece, num_visible = waiting.popleft()
            self._num_certain -= num_visible
            taken.append(piece)
        return taken
