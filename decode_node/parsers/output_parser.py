"""Parses the output of one choice.

1. `push` with the pieces of each output, a replayed one among them; returns what is new
2. `finish` once, when the request has ended; returns what was kept back
3. `incomplete` then tells whether reasoning or a call broke off
"""

from __future__ import annotations

from collections.abc import Iterable

from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.deltas import Delta
from decode_node.parsers.stages.stage import Stage
from decode_node.parsers.text.marked_text import MarkerTokens
from engine.frontend.text.pieces import Piece


class OutputParser:
    """Turns pieces into deltas.

    Attributes:
        num_reasoning_tokens: Tokens inside of reasoning so far, its markers not counted.
    """

    def __init__(self, markers: MarkerTokens, sink: DeltaSink, stage: Stage) -> None:
        self._markers = markers
        self._sink = sink
        self._stage = stage
        self.num_reasoning_tokens = 0
        self._num_undecided = 0
        """Tokens that are reasoning, or else a call's."""

    def push(self, pieces: Iterable[Piece]) -> list[Delta]:
        """Takes the next pieces. Never raises, whatever the model writes."""
        stage = self._stage
        for piece in pieces:
            if piece != "":
                stage.push(self._markers.marked(piece))
            if stage.is_reasoning and isinstance(piece, str):
                self._num_undecided += 1
            if not stage.is_undecided:
                self._count(is_reasoning=stage.is_reasoning)
        return self._sink.take()

    def finish(self) -> list[Delta]:
        """Ends the answer, wherever it is."""
        self._count(is_reasoning=self._stage.is_reasoning)
        self._stage.finish()
        self._sink.finish()
        return self._sink.take()

    def _count(self, *, is_reasoning: bool) -> None:
        self.num_reasoning_tokens += self._num_undecided * is_reasoning
        self._num_undecided = 0

    @property
    def num_calls(self) -> int:
        """Returns the number of calls that have started."""
        return self._sink.num_calls

    @property
    def incomplete(self) -> str:
        """Returns `reasoning` or `call` when one broke off, else ""."""
        return self._sink.incomplete
