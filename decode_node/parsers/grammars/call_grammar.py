"""Grammars of calls, from the table that the parsers follow too.

A parser and the grammar of its format are inverse: what the grammar lets through is read as calls
whose arguments follow the tools' schemas.

    before  prefix rest  separator  prefix rest  ...  after
            └─ one call ┘                                       `Shape`, for each format
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from decode_node.grammar.grammar_text import (
    NOTHING,
    Expression,
    GrammarText,
    any_token_but,
    either,
    json_schema,
    literal,
    optional,
    regex,
    repeat,
    sequence,
)
from decode_node.grammar.schemas.schema_checks import check_numbers
from decode_node.parsers.families.formats import (
    AddressFormat,
    BracedFormat,
    CallFormat,
    HarmonyFormat,
    JsonListFormat,
    JsonObjectFormat,
    MistralFormat,
    NamedJsonFormat,
    PythonicFormat,
    XmlFormat,
)
from decode_node.parsers.grammars.parameter_grammar import (
    TaggedParameters,
    braced_arguments,
    keyword_arguments,
    spell,
)
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.protocol.chat.tools import Tool
from edge.http.errors import BadRequest

_PLAIN_NAME = re.compile(r"[^\s<>()\[\]{}\"'=:|｜]+")
_MAX_NUMBER = 4
"""Digits of a call's number."""
_CALL_ID = "[a-z0-9]{10}"
"""Matches an id as Solar's template asks for it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The texts around calls, and what one is.

    Attributes:
        begin: The text with which calls begin; "" where they have no marker.
        opening: Matches what stands between `before` and the first call.
        rest: Makes the expression of one call, without its prefix.
    """

    begin: str
    before: str
    prefix: str
    separator: str
    after: str
    rest: Callable[[Tool], Expression]
    opening: Expression = NOTHING


class CallGrammar:
    """Writes the calls of one format into one grammar.

    Args:
        text: The grammar, to which rules are added.
        markers: The model's tokens. Where it has them, markers are tokens and no text.
        frames: What stands around parts of an answer.
    """

    def __init__(
        self,
        text: GrammarText,
        form: CallFormat,
        markers: MarkerTokens,
        frames: Collection[str] = (),
    ) -> None:
        self._text = text
        self._form = form
        self._markers = markers
        self._frames = frames
        self._shape = self._shape_of(form)

    def calls(self, tools: Sequence[Tool], *, most: int | None = None) -> Expression:
        """Matches one call or several and nothing else; at most `most`. Raises `BadRequest` for a
        strict tool that this format cannot be held to."""
        return self._first_calls(self._rules(tools), most)

    def text_with_calls(
        self, tools: Sequence[Tool], end_ids: Collection[int], *, most: int | None = None
    ) -> Expression:
        """Matches any text with any number of calls in it, at most `most`. What begins as a call
        is one. Raises `BadRequest` as `calls` does."""
        rules, begin = self._rules(tools), self._shape.begin
        if isinstance(self._form, HarmonyFormat):
            return self._harmony_messages(self._form, rules, end_ids)
        if isinstance(self._form, XmlFormat) and self._form.messages:
            return self._addressed_messages(self._form.messages, rules, end_ids, most)
        if not begin or isinstance(self._form, PythonicFormat):
            other = regex(r"([ \n\r\t]*[^ \n\r\t\[{](.|\n)*)?")
            return either(self._calls(rules, most, skipped=0), self._text.rule("text", other))
        if self._may_be_bare:
            heads = "|".join(re.escape(tool.name) for tool in tools)
            call = f"((.|\n)*{re.escape(begin)})?({heads})\n[ \n\r\t]*\\{{"
            return either(self._first_calls(rules, most), self._text.not_beginning("text", call))
        ids = {part for part in self._markers.pieces(begin) if isinstance(part, int)}
        if ids:
            free = self._text.rule("text", repeat(self._any_but(ids | set(end_ids))))
            part = sequence(self._calls(rules, most, skipped=0), free)
            return sequence(free, optional(part) if most == 1 else repeat(part))
        calls = self._calls(rules, most, skipped=len(begin))
        part = sequence(self._text.until("text_before", begin), calls)
        free = self._text.without("text", begin)
        answer = sequence(optional(part) if most == 1 else repeat(part), free)
        if not (content := self.before_content(self._form)):
            return answer
        return either(
            sequence(self._first_calls(rules, most), free), sequence(literal(content), answer)
        )

    @staticmethod
    def before_content(form: CallFormat) -> str:
        """Returns what stands before content in this format of calls."""
        if isinstance(form, NamedJsonFormat) and form.content_name:
            return form.content_name + form.after_name
        return ""

    def _first_calls(self, call: Expression, most: int | None) -> Expression:
        """Matches calls at the beginning of an answer, the first marker of which may be the
        prompt's end."""
        is_begun = self._may_be_bare or self.before_content(self._form)
        begun = len(self._shape.begin) if is_begun else 0
        return self._calls(call, most, skipped=begun)

    @property
    def _may_be_bare(self) -> bool:
        return isinstance(self._form, NamedJsonFormat) and self._form.may_be_bare

    def _any_but(self, ids: set[int]) -> Expression:
        """Matches a token that is none of `ids`, or what stands around parts."""
        free = any_token_but(ids)
        return either(free, *map(self._spell, self._frames)) if self._frames else free

    def answer(self, body: Expression) -> Expression:
        """Matches an answer that is `body`, with what the format has around content."""
        form = self._form
        if not isinstance(form, HarmonyFormat):
            return body
        return sequence(self._spell(f"{form.channel}final{form.message}"), body)

    def _rules(self, tools: Sequence[Tool]) -> Expression:
        if not self._has_quoted_names:
            for tool in tools:
                _check_name(tool)
        for tool in tools:
            if tool.strict:
                check_numbers(tool.parameters, "tools")
        rest = self._shape.rest
        return self._text.rule("call", either(*map(rest, tools)))

    def _calls(self, call: Expression, most: int | None, *, skipped: int) -> Expression:
        """Matches calls, without the first characters of their text, which are matched already."""
        shape = self._shape
        if isinstance(self._form, HarmonyFormat):
            most = 1  # a call ends the turn
        before, prefix = shape.before[skipped:], shape.prefix[max(0, skipped - len(shape.before)) :]
        first = sequence(self._spell(before), shape.opening, self._spell(prefix))
        more = sequence(self._spell(shape.separator + shape.prefix), call)
        others = repeat(more, 0, None if most is None else most - 1)
        return sequence(first, call, others, self._spell(shape.after))

    @property
    def _has_quoted_names(self) -> bool:
        """Says whether names are JSON, so that they may have any characters."""
        return isinstance(self._form, JsonObjectFormat | JsonListFormat) or (
            isinstance(self._form, MistralFormat) and not self._has_token(self._form.arguments)
        )

    def _has_token(self, text: str) -> bool:
        return any(isinstance(part, int) for part in self._markers.pieces(text))

    def _spell(self, text: str) -> Expression:
        return spell(self._markers, text)

    def _arguments(self, tool: Tool) -> Expression:
        schema = {**tool.parameters, "type": "object"}
        return self._text.rule("arguments", json_schema(schema, lenient=not tool.strict))

    def _shape_of(self, form: CallFormat) -> Shape:
        match form:
            case JsonObjectFormat():
                return self._object_shape(form)
            case JsonListFormat():
                return self._list_shape(form)
            case NamedJsonFormat():
                return self._named_shape(form)
            case MistralFormat():
                return self._mistral_shape(form)
            case XmlFormat():
                return self._xml_shape(form)
            case HarmonyFormat():
                return self._harmony_shape(form)
            case PythonicFormat():
                return self._pythonic_shape(form)
            case BracedFormat():
                return self._braced_shape(form)

    def _object_shape(self, form: JsonObjectFormat) -> Shape:
        """Returns the shape of objects with markers around each, or around all where an object may
        be bare."""
        is_bare = form.may_be_bare
        end = form.padding + form.end

        def rest(tool: Tool) -> Expression:
            name = f'{_quoted(tool.name)}, "{form.arguments_key}": '
            closing = self._spell("}" if is_bare else f"}}{end}")
            return sequence(literal(name), self._arguments(tool), closing)

        name = f'{form.padding}{{"name": '
        if is_bare:
            before = form.begin if form.end else ""
            return Shape("", before, name, form.separator, end, rest)
        return Shape(form.begin, form.lead, form.begin + name, form.separator, "", rest)

    def _list_shape(self, form: JsonListFormat) -> Shape:
        prefix = f'{{"{form.id_key}": "' if form.id_key else "{"

        def rest(tool: Tool) -> Expression:
            number = (
                sequence(regex(f"[0-9]{{1,{_MAX_NUMBER}}}"), literal('", '))
                if form.id_key
                else NOTHING
            )
            name = f"{_quoted(tool.name)}: "
            if form.name_key:
                name = f'"{form.name_key}": {_quoted(tool.name)}, "{form.arguments_key}": '
            return sequence(number, literal(name), self._arguments(tool), literal("}"))

        return Shape(
            form.begin,
            form.begin + form.opening,
            prefix,
            form.separator,
            form.closing + form.end,
            rest,
        )

    def _named_shape(self, form: NamedJsonFormat) -> Shape:
        def rest(tool: Tool) -> Expression:
            number = regex(f":[0-9]{{1,{_MAX_NUMBER}}}") if form.numbers_calls else NOTHING
            call_id = regex(_CALL_ID) if form.id_end else NOTHING
            return sequence(
                call_id,
                self._spell(form.id_end),
                literal(tool.name),
                number,
                self._spell(form.after_name),
                self._arguments(tool),
                self._spell(form.after_arguments + form.end),
            )

        return Shape(
            form.section_begin or form.begin,
            form.section_begin,
            form.begin + form.before_name,
            form.separator,
            form.section_end,
            rest,
        )

    def _mistral_shape(self, form: MistralFormat) -> Shape:
        """Returns the newer shape where the model has the token for it, else the array."""

        def named(tool: Tool) -> Expression:
            return sequence(literal(tool.name), self._spell(form.arguments), self._arguments(tool))

        def item(tool: Tool) -> Expression:
            name = f'{_quoted(tool.name)}, "arguments": '
            return sequence(literal(name), self._arguments(tool), literal("}"))

        if self._has_token(form.arguments):
            return Shape(form.begin, "", form.begin, "", "", named)
        bracket = sequence(optional(literal(" ")), literal("["))
        return Shape(form.begin, form.begin, '{"name": ', ", ", "]", item, bracket)

    def _xml_shape(self, form: XmlFormat) -> Shape:
        section, end, messages = form.section_begin, form.section_end, form.messages
        before = f"{form.lead}{section}{form.gap}" if section else form.lead
        after = f"{form.gap}{end}" if end else ""
        is_own = form.has_own_sections
        parameters = TaggedParameters(self._text, form, self._markers)

        def rest(tool: Tool) -> Expression:
            before_number, _, after_number = form.number.partition("{}")
            number = regex(f"[0-9]{{1,{_MAX_NUMBER}}}") if form.number else NOTHING
            address = NOTHING
            if messages:
                head = messages.message + before + form.before_name
                address = sequence(literal(tool.name), self._spell(head))
            return sequence(
                address,
                literal(tool.name),
                self._spell(form.after_name + before_number),
                number,
                self._spell(after_number + form.header_end + form.inner_gap),
                parameters.of(tool),
                self._spell(form.end + (after if is_own else "")),
            )

        if messages:
            between = messages.end + messages.start + messages.role
            return Shape(messages.to, "", messages.to, between, "", rest)
        return Shape(
            section or form.before_name,
            "" if is_own else before,
            (before if is_own else "") + form.before_name,
            form.gap,
            "" if is_own else after,
            rest,
        )

    def _harmony_shape(self, form: HarmonyFormat) -> Shape:
        """Returns the shape of a call. The token behind it is one of the model's ends, or else an
        answer ends without it as well."""

        def rest(tool: Tool) -> Expression:
            header = f" {form.constrain}json{form.message}"
            return sequence(literal(tool.name), self._spell(header), self._arguments(tool))

        prefix = f"{form.channel}commentary to=functions."
        return Shape(form.channel, "", prefix, "", "", rest)

    def _harmony_messages(
        self, form: HarmonyFormat, call: Expression, end_ids: Collection[int]
    ) -> Expression:
        """Matches reasoning and remarks, and then an answer or a call."""
        special = [form.end, form.start, form.channel, form.call, form.final]
        ids = {part for text in special for part in self._markers.pieces(text)}
        text_ids = {part for part in ids if isinstance(part, int)} | set(end_ids)
        words = self._text.rule("text", repeat(any_token_but(text_ids)))
        kind = either(literal("analysis"), literal("commentary"))
        message = sequence(
            self._spell(form.channel),
            kind,
            self._spell(form.message),
            words,
            self._spell(f"{form.end}{form.start}assistant"),
        )
        last = either(
            sequence(self._spell(f"{form.channel}final{form.message}"), words),
            self._calls(call, 1, skipped=0),
        )
        return sequence(repeat(self._text.rule("message", message)), last)

    def _addressed_messages(
        self, form: AddressFormat, call: Expression, end_ids: Collection[int], most: int | None
    ) -> Expression:
        """Matches reasoning and remarks, and then an answer or calls."""
        special = [form.start, form.message, form.end, form.last]
        ids = {part for text in special for part in self._markers.pieces(text)}
        text_ids = {part for part in ids if isinstance(part, int)} | set(end_ids)
        words = self._text.rule("text", repeat(any_token_but(text_ids)))
        header = sequence(
            self._spell(form.to),
            either(literal(form.oneself), literal(form.user)),
            self._spell(form.message),
        )
        message = sequence(header, words, self._spell(form.end + form.start + form.role))
        last = sequence(self._spell(form.before_content), words)
        calls = self._calls(call, most, skipped=0)
        return sequence(repeat(self._text.rule("message", message)), either(last, calls))

    def _pythonic_shape(self, form: PythonicFormat) -> Shape:
        def rest(tool: Tool) -> Expression:
            arguments = keyword_arguments(self._text, tool)
            return sequence(literal(f"{tool.name}("), arguments, literal(")"))

        before, after = form.begin + form.opening, form.closing + form.end
        return Shape(form.begin, before, "", form.separator, after, rest)

    def _braced_shape(self, form: BracedFormat) -> Shape:
        def rest(tool: Tool) -> Expression:
            arguments = braced_arguments(self._text, tool, form, self._markers)
            end = self._spell("}" + form.end)
            return sequence(literal(tool.name + "{"), arguments, end)

        return Shape(form.begin, "", form.begin + form.before_name, "", "", rest)


def _check_name(tool: Tool) -> None:
    """Raises `BadRequest` for a name that this format could not be read back from."""
    if not _PLAIN_NAME.fullmatch(tool.name):
        raise BadRequest(
            f"a call of {tool.name!r} cannot be enforced in this model's format; names of letters, "
            "digits, _, - and . can",
            param="tools",
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
