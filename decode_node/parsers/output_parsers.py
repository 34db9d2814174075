"""Chooses the parsers of one server's model, and makes one for each choice of an answer.

1. at start: `OutputParsers.of_model`, by name or by the chat template
2. a request: `marker_token_ids` goes into its `GenerationRequest`, and `opens_reasoning` is
   asked about its rendered prompt
3. each choice: `parser`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from decode_node.grammar.reasoning import Marker, ReasoningFormat
from decode_node.parsers.families import REASONING_FAMILIES, ReasoningFamily
from decode_node.parsers.marked_text import MarkerTokens
from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.reasoning import ReasoningStage
from decode_node.parsers.stage import PlainContent, Stage
from decode_node.protocol.tools import Tool

AUTO = "auto"


class UnknownParser(ValueError):
    """No parser has this name. The text lists those there are."""


class ModelTexts(Protocol):
    """The part of a tokenizer that parsers are chosen by."""

    @property
    def added_token_ids(self) -> Mapping[str, int]: ...


class OutputParsers:
    """Holds the formats of one model.

    Attributes:
        marker_token_ids: Tokens that a parser wants to see as pieces of their own.
        reasoning_parser: The name of the parser of reasoning, "" for none.
        tool_call_parser: The name of the parser of calls, "" for none.
        reasoning_format: What the model writes around its reasoning; None for none.
    """

    def __init__(
        self, added_token_ids: Mapping[str, int], reasoning: ReasoningFamily | None = None
    ) -> None:
        self._reasoning = reasoning
        self.reasoning_parser = reasoning.names[0] if reasoning else ""
        self.tool_call_parser = ""
        self.reasoning_format = (
            ReasoningFormat(
                Marker(reasoning.begin, added_token_ids.get(reasoning.begin)),
                Marker(reasoning.end, added_token_ids.get(reasoning.end)),
            )
            if reasoning
            else None
        )
        self._markers = MarkerTokens(added_token_ids, reasoning.literals if reasoning else ())
        self.marker_token_ids = self._markers.token_ids

    @classmethod
    def of_model(
        cls, tokenizer: ModelTexts, template: str = "", *, reasoning_parser: str = AUTO
    ) -> OutputParsers:
        """Chooses parsers by their names; `auto` recognises the format in the chat template's
        source, and "" is none. Raises `UnknownParser`."""
        if reasoning_parser == AUTO:
            reasoning = next(
                (f for f in REASONING_FAMILIES if f.begin in template and f.end in template), None
            )
        else:
            reasoning = _named(reasoning_parser)
        return cls(tokenizer.added_token_ids, reasoning)

    def parser(
        self, tools: Sequence[Tool] = (), *, is_reasoning_open: bool = False
    ) -> OutputParser:
        """Returns the parser of one choice. Calls of functions that are not among `tools` are
        content; without tools no call is parsed."""
        stage: Stage = PlainContent()
        if self._reasoning is not None:
            markers, form = self._markers, self._reasoning
            stage = ReasoningStage(
                markers.translate(form.begin),
                markers.translate(form.end),
                stage,
                is_open=is_reasoning_open,
                ends_before=markers.translate(form.ends_before),
            )
        return OutputParser(self._markers, stage, may_call=bool(tools))


def _named(name: str) -> ReasoningFamily | None:
    if not name:
        return None
    for form in REASONING_FAMILIES:
        if name in form.names:
            return form
    known = ", ".join(sorted(name for form in REASONING_FAMILIES for name in form.names))
    raise UnknownParser(f"no reasoning parser is called {name!r}; there are auto, {known}")
