"""Says where an answer's thinking begins and ends, and whether a prompt has already begun it.

What is decided here is decided once for each request, from the rendered prompt. Afterwards nothing
looks for markers again: the grammar itself holds the way from thinking to the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Marker:
    """A text that the model writes around its thinking; with `token_id`, it is that one token."""

    text: str
    token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Describes what a family of models writes around its thinking.

    Attributes:
        begin: What the model writes first, unless the prompt ends with it.
        end: What ends the thinking.
        after: What comes between the end and the answer, always; "" for nothing but line breaks.
        others: Tokens that end the thinking for a parser, and so must not come amid it.
    """

    begin: Marker
    end: Marker
    after: str = ""
    others: frozenset[int] = frozenset()


class ReasoningState(Enum):
    """How far the prompt is when the model's turn begins."""

    OPEN = auto()
    """It has begun the thinking, which the answer goes on with."""
    CLOSED = auto()
    """The thinking is over, or was turned off: the answer begins at once."""
    POSSIBLE = auto()
    """The model may begin to think, and need not."""


def reasoning_state(prompt: str, form: ReasoningFormat, *, continued: str = "") -> ReasoningState:
    """Returns the state at the end of a rendered prompt.

    Only its very end counts: earlier turns, and what users wrote, may hold the same markers.
    `continued` is the text of an assistant's message that the model is to go on with, the end of
    the prompt.
    """
    begin, end = form.begin.text, form.end.text
    tail = prompt.rstrip()
    if tail.endswith(begin):
        return ReasoningState.OPEN
    if tail.endswith(end):
        return ReasoningState.CLOSED
    if not continued.strip():
        return ReasoningState.POSSIBLE
    is_open = continued.rfind(begin) > continued.rfind(end)
    return ReasoningState.OPEN if is_open else ReasoningState.CLOSED
