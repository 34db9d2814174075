"""Reads the outputs of all choices of one answer: what is reasoning, content, or a call.

Each choice has a parser of its own, which sees every output once: first a replayed one, where
another node began the answer, and then what is new. Choices without a parser are all content.

The arguments of calls are JSON that clients read, so strings in them are made valid where the
model's are not (`decode_node.protocol.bodies.valid_strings`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode_node.answer.choice import ChoiceResult
from decode_node.answer.content_logprobs import ContentLogprobs
from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from decode_node.parsers.visible_text import without_end
from decode_node.protocol.bodies.valid_strings import ValidStrings
from engine.frontend.output_processor import RequestOutput
from engine.frontend.text.pieces import Piece

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
    """Reads the choices of one answer. `make` gives each its parser; without it there is none.
    `has_logprobs`: content comes with the log probabilities of its tokens."""

    def __init__(self, make: MakeParser | None = None, *, has_logprobs: bool = False) -> None:
        self._make = make
        self._has_logprobs = has_logprobs
        self._logprobs: dict[int, ContentLogprobs] = {}
        self._parsers: dict[int, OutputParser] = {}
        self._strings: dict[int, ValidStrings] = {}
        """The strings of the call that each choice is at."""

    @property
    def has_parsers(self) -> bool:
        return self._make is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Returns how many tokens of all choices so far are reasoning."""
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())

    def read(self, choice: int, output: RequestOutput) -> list[Delta]:
        """Returns the deltas of one output."""
        if self._has_logprobs:
            self._logprobs_of(choice).add(output.logprobs, len(output.token_ids))
        if self._make is None:
            return self._plain(choice, output.text, len(output.token_ids))
        return self._parsed(choice, output.pieces or (), output.num_hidden, is_end=output.finished)

    def read_whole(self, result: ChoiceResult) -> list[Delta]:
        """Returns the deltas of a complete choice of which nothing was read before."""
        choice, num_tokens = result.choice.index, len(result.token_ids)
        if self._has_logprobs:
            self._logprobs_of(choice).add(result.logprobs, num_tokens)
        if self._make is None:
            return self._plain(choice, result.text, num_tokens)
        return self._parsed(choice, result.pieces, result.num_hidden, is_end=True)

    def has_called(self, choice: int) -> bool:
        """Returns whether the choice holds calls. A broken one counts as well: the client was sent
        of it, and has to answer it."""
        parser = self._parsers.get(choice)
        return parser is not None and parser.num_calls > 0

    def _plain(self, choice: int, text: str, num_tokens: int) -> list[Delta]:
        deltas: list[Delta] = [ContentText(text)] if text else []
        if self._has_logprobs:
            return self._logprobs_of(choice).attach(deltas, num_tokens)
        return deltas

    def _parsed(
        self, choice: int, pieces: Sequence[Piece], num_hidden: int, *, is_end: bool
    ) -> list[Delta]:
        parser = self._parser(choice)
        if self._has_logprobs:
            logprobs = self._logprobs_of(choice)
            deltas = [delta for piece in pieces for delta in logprobs.attach(parser.push((piece,)))]
        else:
            deltas = parser.push(pieces)
        if is_end:
            deltas = without_end(deltas + self._last(choice, parser.finish()), num_hidden)
        return self._with_valid_strings(choice, deltas)

    def _last(self, choice: int, deltas: list[Delta]) -> list[Delta]:
        return self._logprobs_of(choice).attach(deltas, 0) if self._has_logprobs else deltas

    def _logprobs_of(self, choice: int) -> ContentLogprobs:
        return self._logprobs.setdefault(choice, ContentLogprobs())

    def _with_valid_strings(self, choice: int, deltas: list[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                self._strings[choice] = ValidStrings()
            if not isinstance(delta, CallArguments):
                found.append(delta)
            elif text := self._strings[choice].push(delta.text):
                found.append(CallArguments(delta.index, text))
        return found

    def _parser(self, choice: int) -> OutputParser:
        assert self._make is not None
        if choice not in self._parsers:
            self._parsers[choice] = self._make()
        return self._parsers[choice]
