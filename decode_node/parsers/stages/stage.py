"""Defines a stage of parsing, and the plainest one."""

from __future__ import annotations

from typing import Protocol

from decode_node.parsers.stages.delta_sink import DeltaSink


class Stage(Protocol):
    """A state machine over the marked text of one answer, which gives its finds to a sink.

    `push` takes any cut of the text, and keeps back what may still become a marker. `is_reasoning`
    says whether the text so far ends inside of reasoning, and `is_undecided` that it may also end
    inside of a call.
    """

    is_reasoning: bool

    @property
    def is_undecided(self) -> bool: ...

    def push(self, text: str) -> None: ...

    def finish(self) -> None:
        """Gives what was kept back: no more text will come."""


class PlainContent:
    """Takes everything as content: no call is possible."""

    is_reasoning = False
    is_undecided = False

    def __init__(self, sink: DeltaSink) -> None:
        self.push = sink.content

    def finish(self) -> None:
        """Does nothing: nothing was kept back."""
