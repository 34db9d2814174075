"""The part that stages share which read by steps: text comes, and the parser goes on with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.paragraphs import Paragraphs
from decode_node.parsers.text.text_input import Steps, TextInput, marker_set


class StepStage(ABC):
    """Drives a parser of `source` that is written as if all of the text were there."""

    is_reasoning = False
    is_undecided = False

    def __init__(self, sink: DeltaSink) -> None:
        self.sink = sink
        self.source = TextInput()
        self._steps = self.run()

    @abstractmethod
    def run(self) -> Steps[None]:
        """Reads all of the text. It begins with the first of it."""

    def push(self, text: str) -> None:
        self.source.feed(text)
        next(self._steps)

    def finish(self) -> None:
        self.source.is_end = True
        next(self._steps, None)


class MessageStage(StepStage):
    """Reads an answer that is a row of messages.

    Args:
        begins: Markers that begin the next message.
        ends: Markers that end a body, besides those.
        is_open: The prompt ends amid reasoning.
    """

    def __init__(
        self, sink: DeltaSink, begins: Collection[str], ends: Collection[str], *, is_open: bool
    ) -> None:
        super().__init__(sink)
        self.is_reasoning = is_open
        self.paragraphs = Paragraphs()
        self._begins = frozenset(begins)
        self._body_ends = marker_set(*begins, *ends)

    def reasoning(self) -> Steps[None]:
        """Reads a body as reasoning."""
        self.is_reasoning = True
        end = yield from self.body(self.paragraphs.next("reasoning", self.sink.reasoning))
        if not end:
            self.sink.incomplete = "reasoning"
        self.is_reasoning = False

    def body(self, emit: Callable[[str], object]) -> Steps[str]:
        """Gives the body of a message to `emit` and returns the marker that ended it; one that
        begins the next message stays."""
        marker = yield from self.source.until(self._body_ends, emit)
        self.source.put_back(marker if marker in self._begins else "")
        return marker
