"""Chooses the parsers of one server's model, and makes one for each choice of an answer.

1. at start: `OutputParsers.of_model`, by name or by the chat template
2. a request: `marker_token_ids` goes into its `GenerationRequest`; `reasoning_format`, with
   its rendered prompt, tells whether reasoning is open (`grammar.reasoning_state`)
3. each choice: `parser`
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from decode_node.grammar.grammar_text import Expression, GrammarText, sequence
from decode_node.grammar.reasoning import Marker, ReasoningFormat
from decode_node.parsers.calls.addressed import AddressedStage
from decode_node.parsers.calls.braced_calls import BracedStage
from decode_node.parsers.calls.element_calls import ElementStage
from decode_node.parsers.calls.harmony import HarmonyStage
from decode_node.parsers.calls.json_calls import (
    JsonListStage,
    JsonObjectStage,
    MistralStage,
    NamedJsonStage,
)
from decode_node.parsers.calls.pythonic import PythonicStage
from decode_node.parsers.calls.xml_calls import XmlStage
from decode_node.parsers.families.families import CALL_FAMILIES, CallFamily
from decode_node.parsers.families.formats import (
    AddressFormat,
    BracedFormat,
    CallFormat,
    ElementFormat,
    HarmonyFormat,
    JsonListFormat,
    JsonObjectFormat,
    MistralFormat,
    NamedJsonFormat,
    PythonicFormat,
    XmlFormat,
    literals,
)
from decode_node.parsers.families.reasoning_families import REASONING_FAMILIES, ReasoningFamily
from decode_node.parsers.grammars.call_grammar import CallGrammar
from decode_node.parsers.grammars.parameter_grammar import spell
from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.reasoning import ReasoningStage
from decode_node.parsers.stages.call_stage import CallStage, FramedContent
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.deltas import CallArguments, CallStart, ContentText
from decode_node.parsers.stages.stage import PlainContent, Stage
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.protocol.chat.tools import Tool, ToolUse

AUTO = "auto"

ANY_MODEL = JsonObjectFormat(begin="", may_be_bare=True, separator=", ")
"""Calls of a model whose own format is not known, which a grammar has to force."""


class UnknownParser(ValueError):
    """No parser has this name. The text lists those there are."""


class ModelTexts(Protocol):
    """The part of a tokenizer that parsers are chosen by."""

    @property
    def added_token_ids(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as the chat template writes it for an earlier turn: as the model has learned it.

    Attributes:
        text: What the answer was, from its beginning; "" where the template writes no calls.
        tool: The function that is called.
        arguments: The arguments of the call.
    """

    text: str
    tool: Tool
    arguments: Mapping[str, Any]


class OutputParsers:
    """Holds the formats of one model.

    Attributes:
        marker_token_ids: Tokens that a parser wants to see as pieces of their own.
        reasoning_parser, tool_call_parser: The names of the parsers, "" for none.
        reasoning_format: What the model writes around its reasoning; None for none.
        is_unread: The chat template writes calls, and no parser reads them.
    """

    def __init__(
        self,
        added_token_ids: Mapping[str, int],
        reasoning: ReasoningFamily | None = None,
        calls: CallFamily | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.is_unread = False
        self.reasoning_parser = reasoning.names[0] if reasoning else ""
        self.tool_call_parser = calls.names[0] if calls else ""
        self._harmony = _harmony(reasoning, calls)
        self._messages = _messages(reasoning, calls)
        self._frames = dict.fromkeys(
            frame for family in (reasoning, calls) if family for frame in family.frames
        )
        self._before_content = reasoning.before_content if reasoning else ""
        if self._messages is not None:
            self._before_content = self._messages.before_content
        elif calls and not self._before_content:
            self._before_content = CallGrammar.before_content(calls.form)
        self.reasoning_format = self._reasoning_format(added_token_ids)
        texts = [*self._frames, *(literals(reasoning) if reasoning else ())]
        texts += literals(calls.form) if calls else []
        for messages in (self._harmony, self._messages):
            texts += literals(messages) if messages else []
        self._token_ids = added_token_ids
        self._markers = MarkerTokens(added_token_ids, texts)
        self.marker_token_ids = self._markers.token_ids

    @property
    def read_every_answer(self) -> bool:
        """Says whether answers need a parser even where no tool may be called."""
        is_framed = bool(self._frames or self._before_content)
        has_messages = self._harmony is not None or self._messages is not None
        return self._reasoning is not None or has_messages or is_framed

    def _reasoning_format(self, token_ids: Mapping[str, int]) -> ReasoningFormat | None:
        reasoning = self._reasoning
        if reasoning is None:
            return None
        ends = {reasoning.ends_before}
        for messages in (self._harmony, self._messages):
            ends |= set(literals(messages)) if messages else set()
        if self._calls is not None:
            names = ("section_begin", "begin", "before_name")
            ends |= {getattr(self._calls.form, name, "") for name in names}
        return ReasoningFormat(
            Marker(reasoning.begin, token_ids.get(reasoning.begin)),
            Marker(reasoning.end, token_ids.get(reasoning.end)),
            reasoning.after,
            MarkerTokens(token_ids, ends).token_ids - {token_ids.get(reasoning.end, -1)},
        )

    @classmethod
    def of_model(
        cls,
        tokenizer: ModelTexts,
        template: str = "",
        *,
        reasoning_parser: str = AUTO,
        tool_call_parser: str = AUTO,
        written: WrittenCall | None = None,
    ) -> OutputParsers:
        """Chooses parsers by their names; `auto` recognises the format in the chat template's
        source, and "" is none. With a call that the template wrote, `auto` takes the parser that
        reads it, or else the one whose calls the template describes, and none where there is
        neither. Raises `UnknownParser`."""
        known = tokenizer.added_token_ids
        if reasoning_parser == AUTO:
            reasoning = next((f for f in REASONING_FAMILIES if _fits(f, template, known)), None)
        else:
            reasoning = _named(REASONING_FAMILIES, reasoning_parser, "reasoning")
        if tool_call_parser != AUTO:
            calls = _named(CALL_FAMILIES, tool_call_parser, "tool call")
            return cls(known, reasoning, calls)
        likely = [f for f in CALL_FAMILIES if _has_signs(f, template, known)]
        asked = [f for f in CALL_FAMILIES if f.instruction and f.instruction in template]
        if written is None or not written.text:
            return cls(known, reasoning, next(iter([*likely, *asked]), None))
        others = () if asked else (f for f in CALL_FAMILIES if f not in likely)
        for family in (*likely, *others):
            found = cls(known, reasoning, family)
            if found.reads(written):
                return found
        found = cls(known, reasoning, asked[0] if asked else None)
        found.is_unread = not asked
        return found

    def reads(self, written: WrittenCall) -> bool:
        """Says whether the parser finds this call in its text, and before it nothing but the edges
        of reasoning."""
        parser = OutputParsers(self._token_ids, None, self._calls).parser([written.tool])
        deltas = parser.push(self._markers.pieces(written.text)) + parser.finish()
        names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
        before = itertools.takewhile(lambda delta: not isinstance(delta, CallStart), deltas)
        said = "".join(delta.text for delta in before if isinstance(delta, ContentText))
        for marker in literals(self._reasoning) if self._reasoning else ():
            said = said.replace(marker, "")
        arguments = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))
        try:
            is_right = json.loads(arguments or "null") == written.arguments
        except ValueError:
            is_right = False
        return is_right and names == [written.tool.name] and not said.strip()

    def call_grammar(
        self, text: GrammarText, use: ToolUse, end_ids: Collection[int]
    ) -> Expression | None:
        """Returns what the answer must match behind its reasoning, for the tools' sake; None where
        they ask for nothing: `required` and a named tool are calls and nothing else, and with
        strict tools under `auto`, a single call at most, or tools that are shown and not allowed,
        what begins as a call is one.

        Args:
            text: The grammar, to which rules are added.
            end_ids: The model's end-of-sequence ids.

        Raises:
            BadRequest: A strict tool asks for what this model's format cannot be held to.
        """
        if not use.may_call:
            return None
        form = self._calls.form if self._calls else ANY_MODEL
        grammar = CallGrammar(text, form, self._markers, self._frames)
        most = None if use.is_parallel else 1
        if use.mode == "named":
            return grammar.calls([tool for tool in use.tools if tool.name == use.name], most=1)
        if use.mode == "required":
            return grammar.calls(use.tools, most=most)
        is_held = most == 1 or use.is_limited or any(tool.strict for tool in use.tools)
        if not is_held:
            return None
        return grammar.text_with_calls(use.tools, end_ids, most=most)

    def content_grammar(self, text: GrammarText, body: Expression) -> Expression:
        """Returns `body` with what this model writes around content."""
        if self._harmony is None:
            return sequence(spell(self._markers, self._before_content), body)
        return CallGrammar(text, self._harmony, self._markers).answer(body)

    def parser(
        self, tools: Sequence[Tool] = (), *, is_reasoning_open: bool = False
    ) -> OutputParser:
        """Returns the parser of one choice. Calls of functions that are not among `tools` are
        content; without tools no call is parsed."""
        markers = self._markers
        sink = DeltaSink(markers, may_call=bool(tools))
        stage: Stage
        if self._harmony is not None:
            stage = HarmonyStage(self._harmony, sink, tools, markers, is_open=is_reasoning_open)
            return OutputParser(markers, sink, stage)
        frames = list(map(markers.translate, self._frames))
        stage = FramedContent(sink, frames) if frames else PlainContent(sink)
        if tools or (self._calls and CallGrammar.before_content(self._calls.form)):
            form = self._calls.form if self._calls else ANY_MODEL
            stage = _call_stage(form, sink, tools, markers)
            if frames and isinstance(stage, CallStage):
                stage.drop(frames)
        if self._messages is not None:
            stage = AddressedStage(self._messages, sink, stage, markers, is_open=is_reasoning_open)
            return OutputParser(markers, sink, stage)
        if self._reasoning is not None:
            call_tokens, try_call = self._calls_in_reasoning(tools, stage)
            around = self._reasoning
            stage = ReasoningStage(
                markers.translate(around.begin),
                markers.translate(around.end),
                sink,
                stage,
                is_open=is_reasoning_open,
                ends_before=markers.translate(around.ends_before),
                call_tokens=call_tokens,
                try_call=try_call,
            )
        return OutputParser(markers, sink, stage)

    def _calls_in_reasoning(
        self, tools: Sequence[Tool], stage: Stage
    ) -> tuple[Collection[str], Callable[[], tuple[Stage, DeltaSink]] | None]:
        """Returns the tokens that may begin a call amid reasoning, and what makes a stage that sees
        whether one does."""
        if self._calls is None or not isinstance(stage, CallStage):
            return (), None
        form, markers = self._calls.form, self._markers

        def try_call() -> tuple[Stage, DeltaSink]:
            sink = DeltaSink(markers, may_call=True)
            return _call_stage(form, sink, tools, markers), sink

        return stage.begin_tokens, try_call


def _call_stage(
    form: CallFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
) -> Stage:
    match form:
        case JsonObjectFormat():
            return JsonObjectStage(form, sink, tools, markers)
        case JsonListFormat():
            return JsonListStage(form, sink, tools, markers)
        case NamedJsonFormat():
            return NamedJsonStage(form, sink, tools, markers)
        case MistralFormat():
            return MistralStage(form, sink, tools, markers)
        case ElementFormat():
            return ElementStage(form, sink, tools, markers)
        case XmlFormat():
            return XmlStage(form, sink, tools, markers)
        case PythonicFormat():
            return PythonicStage(form, sink, tools, markers)
        case BracedFormat():
            return BracedStage(form, sink, tools, markers)
        case HarmonyFormat():
            return HarmonyStage(form, sink, tools, markers)


def _harmony(reasoning: ReasoningFamily | None, calls: CallFamily | None) -> HarmonyFormat | None:
    """Returns the format of messages, where either parser is for them: they are read as one."""
    if calls is not None and isinstance(calls.form, HarmonyFormat):
        return calls.form
    form = HarmonyFormat()
    is_harmony = reasoning is not None and reasoning.begin.startswith(form.channel)
    return form if is_harmony else None


def _messages(reasoning: ReasoningFamily | None, calls: CallFamily | None) -> AddressFormat | None:
    """Returns the format of messages that have recipients, where either parser is for them."""
    if calls is not None and isinstance(calls.form, XmlFormat) and calls.form.messages:
        return calls.form.messages
    return reasoning.messages if reasoning is not None else None


def _fits(family: ReasoningFamily, template: str, tokens: Mapping[str, int]) -> bool:
    """Says whether a template knows the family's markers; the beginning may be left to models that
    have a token for it."""
    if family.signs:
        return all(sign in template for sign in family.signs)
    has_begin = family.begin in template or family.begin in tokens
    return has_begin and family.end in template and family.ends_before in template


def _has_signs(family: CallFamily, template: str, tokens: Mapping[str, int]) -> bool:
    return all(sign in template or sign in tokens for sign in family.signs)


Family = TypeVar("Family", ReasoningFamily, CallFamily)


def _named(families: Sequence[Family], name: str, kind: str) -> Family | None:
    if not name:
        return None
    for family in families:
        if name in family.names:
            return family
    known = ", ".join(sorted(name for family in families for name in family.names))
    raise UnknownParser(f"no {kind} parser is called {name!r}; there are auto, {known}")
