"""Says what of an answer a client sees, and cuts it there.

Reasoning, content and the arguments of calls are visible. Headers, markers and the names of
functions are not, so no stop string matches in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from engine.frontend.text.pieces import Piece
from engine.frontend.text.visible_text import Stretch


class ParsedText:
    """Reads one choice for its stop strings alone. `stops_in_reasoning`: they count there too."""

    def __init__(self, parser: OutputParser, *, stops_in_reasoning: bool) -> None:
        self._parser = parser
        self._stops_in_reasoning = stops_in_reasoning

    def push(self, piece: Piece) -> list[Stretch]:
        """Returns the text that this piece makes certain."""
        return self._stretches(self._parser.push((piece,)))

    def finish(self) -> list[Stretch]:
        """Returns what was kept back."""
        return self._stretches(self._parser.finish())

    def _stretches(self, deltas: Sequence[Delta]) -> list[Stretch]:
        found = []
        for delta in deltas:
            match delta:
                case ReasoningText(text):
                    found.append(Stretch("reasoning", text, self._stops_in_reasoning))
                case ContentText(text):
                    found.append(Stretch("content", text))
                case CallArguments(index, text):
                    found.append(Stretch(f"call {index}", text))
        return found


def without_end(deltas: list[Delta], num_hidden: int) -> list[Delta]:
    """Returns deltas up to the last `num_hidden` characters of their texts. A call that is open
    there has broken off."""
    if not num_hidden:
        return deltas
    num_shown, shown = sum(map(len, map(_text, deltas))) - num_hidden, list[Delta]()
    while len(text := _text(delta := deltas[len(shown)])) <= num_shown:
        num_shown -= len(text)
        shown.append(delta)
    hidden = deltas[len(shown) :]
    if num_shown:
        shown.append(_cut(delta, text[:num_shown]))
    calls = (d for d in hidden if isinstance(d, CallStart | CallArguments | CallEnd))
    if isinstance(following := next(calls, None), CallArguments | CallEnd):
        shown.append(CallEnd(following.index, is_complete=False))
    return shown


def _text(delta: Delta) -> str:
    return delta.text if isinstance(delta, ReasoningText | ContentText | CallArguments) else ""


def _cut(delta: Delta, text: str) -> Delta:
    cut: Delta = msgspec.structs.replace(delta, text=text)
    return cut
