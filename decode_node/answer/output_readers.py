"""Reads the outputs of all choices of one answer: what is reasoning, content, or a call.

Each choice has a parser of its own, which sees every output once: first a replayed one, where
another node began the answer, and then what is new. Choices without a parser are all content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode_node.answer.generation import ChoiceResult
from decode_node.parsers.deltas import (
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from decode_node.parsers.output_parser import OutputParser
from engine.frontend.output_processor import RequestOutput

MakeParser = Callable[[], OutputParser]


@dataclass(slots=True)
class CallNews:
    """Has more of the call number `index`; `name` is set where it begins."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class News:
    """Has what one output, or a whole answer, adds to each part of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallNews] = field(default_factory=list)

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> News:
        """Joins deltas: texts by kind, calls by index."""
        news = cls()
        for delta in deltas:
            match delta:
                case ReasoningText(text):
                    news.reasoning += text
                case ContentText(text):
                    news.content += text
                case CallStart(index, name):
                    news._call(index).name = name
                case CallArguments(index, text):
                    news._call(index).arguments += text
        return news

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def _call(self, index: int) -> CallNews:
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallNews(index))
        return self.calls[-1]


class OutputReaders:
    """Reads the choices of one answer. `make` gives each its parser; without it there is none."""

    def __init__(self, make: MakeParser | None = None) -> None:
        self._make = make
        self._parsers: dict[int, OutputParser] = {}

    @property
    def has_parsers(self) -> bool:
        return self._make is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Returns how many tokens of all choices so far are reasoning."""
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())

    def read(self, choice: int, output: RequestOutput) -> list[Delta]:
        """Returns the deltas of one output."""
        if (parser := self._parser(choice)) is None:
            return [ContentText(output.text)] if output.text else []
        deltas = parser.push(output.pieces or ())
        return deltas + parser.finish() if output.finished else deltas

    def read_whole(self, result: ChoiceResult) -> list[Delta]:
        """Returns the deltas of a complete choice of which nothing was read before."""
        if (parser := self._parser(result.choice.index)) is None:
            return [ContentText(result.text)] if result.text else []
        return parser.push(result.pieces) + parser.finish()

    def has_called(self, choice: int) -> bool:
        """Returns whether the choice holds calls. A broken one counts as well: the client was told
        of it, and has to answer it."""
        parser = self._parsers.get(choice)
        return parser is not None and parser.num_calls > 0

    def _parser(self, choice: int) -> OutputParser | None:
        if self._make is None:
            return None
        if choice not in self._parsers:
            self._parsers[choice] = self._make()
        return self._parsers[choice]
