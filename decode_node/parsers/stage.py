"""Defines a stage of parsing: marked text goes in, finds go to the sink."""

from __future__ import annotations

from typing import Protocol

from decode_node.parsers.delta_sink import DeltaSink


class Stage(Protocol):
    """A state machine over the marked text of one answer.

    `push` takes any cut of it, and keeps back what may still become a marker. `is_reasoning` says
    whether the text so far ends inside of reasoning.
    """

    is_reasoning: bool

    def push(self, text: str, sink: DeltaSink) -> None: ...

    def finish(self, sink: DeltaSink) -> None:
        """Gives what was kept back: no more text will come."""


class PlainContent:
    """Takes everything as content: no call is possible."""

    is_reasoning = False

    def push(self, text: str, sink: DeltaSink) -> None:
        sink.content(text)

    def finish(self, sink: DeltaSink) -> None:
        """Does nothing: nothing was kept back."""
