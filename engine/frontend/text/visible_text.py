"""Carries what a reader of pieces knows of them to the engine's frontend.

A parser knows what of an answer a client sees. It lives in the node's server, so a request brings
this much of it along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.frontend.text.pieces import Piece


class Stretch(NamedTuple):
    """Text that a client sees. No stop string matches across the border of two parts.

    Attributes:
        part: Names the part of the answer that it belongs to.
        may_stop: Stop strings count in it.
    """

    part: str
    text: str
    may_stop: bool = True


class VisibleText(Protocol):
    """Reads the pieces of one choice and says what of them is visible."""

    def push(self, piece: Piece) -> Sequence[Stretch]:
        """Returns the text that this piece makes certain."""

    def finish(self) -> Sequence[Stretch]:
        """Returns what was kept back: no more pieces will come."""


@dataclass(frozen=True, slots=True)
class PieceReader:
    """Stands for the parser of one request's pieces.

    Attributes:
        marker_token_ids: Tokens that it wants to see as pieces of their own.
        read_visible: Makes what says, for one choice, where stop strings may match.
    """

    marker_token_ids: frozenset[int]
    read_visible: Callable[[], VisibleText]
