"""Pieces: the output of one request as its parser reads it.

A model marks a tool call, or the end of its thinking, with tokens of their own. In text they can no
longer be told from a quotation that spells the same, so a request may name *marker tokens*
(`GenerationRequest.marker_token_ids`), and its outputs then carry pieces besides the text:

    tokens    "I'll"  " look"  <tool_call>  "\\n{"   ...
    pieces    "I'll"  " look"  151657       "\\n{"   ...

One piece for each token, in order: its id for a marker token, and for every other one the text
that it completes, which is empty in the middle of a character. A character that stays incomplete
is a piece more; a stop token has one only if it is a marker. An output may have fewer pieces than
tokens, because text that may be part of a stop string is kept back whole tokens at a time. Joined,
the strings and the visible markers (tokenizers show some and hide others) are the request's text.

Stop strings are matched on that text as on any other: inside of reasoning and of calls too, as vLLM
does, and across markers, of which hidden ones count as nothing.
"""

from __future__ import annotations

from collections import deque

Piece = str | int
"""Text, or the id of a marker token."""


class PieceQueue:
    """Keeps pieces back until the text that they stand for is certain."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Piece, str]] = deque()
        """Pieces, each with what it adds to the visible text."""
        self._num_certain = 0
        """Characters of the waiting pieces' text that are certain."""

    def add(self, piece: Piece, text: str) -> None:
        """Appends a piece that adds `text` to the visible text."""
        self._waiting.append((piece, text))

    def take(self, num_certain: int, *, is_end: bool = False) -> list[Piece]:
        """Returns the pieces that became certain with `num_certain` more characters of text.

        At the end the last one is what is left of a piece that a stop string has cut.
        """
        waiting, certain = self._waiting, self._num_certain + num_certain
        taken: list[Piece] = []
        while waiting and len(waiting[0][1]) <= certain:
            piece, text = waiting.popleft()
            certain -= len(text)
            taken.append(piece)
        if is_end:
            if waiting and certain:
                taken.append(waiting[0][1][:certain])
            waiting.clear()
        self._num_certain = certain
        return taken
