"""Calls whose arguments are elements with names of their own, at any depth (MiniMax-M3).

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[<places>
        ]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>[</places>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The arguments are composed as JSON, and strings are given while they come. Whether elements make an
object or a list is in the tool's schema, and else in their names; text that is JSON of the right
type is read as well. Null has no form: an argument that is null is left out.

Before every tag stands the same text, so values need no escapes. What ends a text is decided like
in `xml_calls.py`: its closing tag if another tag follows, or the next argument that the schema
knows, or the end of the call; all of a quoted call of a known function is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode_node.parsers.families.formats import ElementFormat
from decode_node.parsers.stages.call_stage import MAX_NAME, CallStage
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.text.marked_text import MarkerTokens, has_token
from decode_node.parsers.text.schema_types import is_text, part_of, types_of, value_json
from decode_node.parsers.text.text_input import MarkerSet, Steps, marker_set
from decode_node.protocol.chat.tools import Tool

_MAX_DEPTH = 64
_NAME_ENDS = MarkerSet([">"])
_INVOKE, _INVOKE_END = 'invoke name="', "/invoke"


class ElementStage(CallStage):
    """Reads calls of an `ElementFormat`."""

    def __init__(
        self, form: ElementFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        marked = markers.translate
        self._section, self._before_name = marked(form.section_begin), marked(form.before_name)
        ends = [marked(form.end), marked(form.section_end)]
        super().__init__(sink, tools, [self._section, self._before_name], ends)
        self._plain = markers.plain
        self._item = form.item
        self._tag_begin = marked(form.tag)
        self._tags = marker_set(self._tag_begin)
        self._section_end = f"/{form.section_end.removeprefix(form.tag)[2:-1]}"
        self._name_ends = marker_set(marked(form.after_name), self._tag_begin)
        self._after_name = marked(form.after_name)
        self._root: Mapping[str, Any] = {}
        """The schema of the call's arguments."""
        self._open: list[str] = []
        """The end tags of what is around the value that is read."""

    def call(self, marker: str) -> Steps[None]:
        source = self.source
        name, end = yield from self.header(
            marker, self._section, self._before_name, self._name_ends
        )
        tool = self.tools.get(name)
        if end != self._after_name or tool is None:
            source.put_back(end)
            return self.reject()
        yield from source.skip_white_space()
        if not (yield from source.comes([self._tag_begin])):
            return self.reject()
        self.accept(tool.name)
        self._root = tool.parameters
        self._open = [_INVOKE_END, self._section_end]
        is_complete = yield from self._elements(self._root, _INVOKE_END, depth=0)
        return self.sink.call_end(is_complete=is_complete)

    def _elements(self, schema: Any, end: str, *, depth: int, first: str = "") -> Steps[bool]:
        """Gives an object up to its end tag; says whether it is complete. `first`: the name of its
        first element, whose tag was taken."""
        opening, given = "{", set[str]()
        while True:
            tag = first or (yield from self._next_tag())
            first = ""
            if tag == end or (tag == self._section_end and end == _INVOKE_END):
                self.sink.arguments("{}" if opening == "{" else "}")
                return True
            if not tag or tag.startswith("/"):
                return False
            key = self._plain(tag)
            given.add(key)
            self.sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            inner = part_of(schema, key, self._root)
            if not (yield from self._value(inner, tag, self._others(schema, given), depth)):
                return False

    def _items(self, schema: Any, end: str, *, depth: int) -> Steps[bool]:
        """Gives a list up to its end tag; the tag of its first element was taken."""
        opening, tag = "[", self._item
        while tag == self._item:
            self.sink.arguments(opening)
            opening = ", "
            inner = part_of(schema, None, self._root)
            if not (yield from self._value(inner, tag, (), depth)):
                return False
            tag = yield from self._next_tag()
        if tag != end:
            return False
        self.sink.arguments("]")
        return True

    def _value(self, schema: Any, tag: str, others: Collection[str], depth: int) -> Steps[bool]:
        """Gives what stands between a tag and its end, which is taken; says whether that came.
        `others`: elements that may follow."""
        types = types_of(schema, self._root)
        if is_text(types, is_json=False) and types:
            self.sink.arguments('"')
            is_complete = bool((yield from self._text(tag, others, self._give_string)))
            self.sink.arguments('"' * is_complete)
            return is_complete
        parts: list[str] = []
        inside = _Inside(schema, self._root) if depth < _MAX_DEPTH else None
        mark = yield from self._text(tag, others, parts.append, inside)
        text = self._plain("".join(parts))
        if mark.startswith("/"):
            self.sink.arguments(_leaf(text, types))
            return True
        if not mark:
            self.sink.arguments(text)
            return False
        is_list = mark == self._item and "object" not in types
        is_list = is_list and ("array" in types or part_of(schema, mark, self._root) is None)
        self._open.append(f"/{tag}")
        if is_list:
            is_complete = yield from self._items(schema, f"/{tag}", depth=depth + 1)
        else:
            is_complete = yield from self._elements(schema, f"/{tag}", depth=depth + 1, first=mark)
        self._open.pop()
        return is_complete

    def _text(
        self,
        tag: str,
        others: Collection[str],
        emit: Callable[[str], object],
        inside: _Inside | None = None,
    ) -> Steps[str]:
        """Gives a text to `emit` and takes its end tag, which is returned; "" where none came.
        Where elements may be `inside`, a text that is blank ends at one, whose name is returned."""
        source = self.source
        num_quoted, is_blank = 0, True

        def give(text: str) -> None:
            nonlocal is_blank
            is_blank = is_blank and not text.strip()
            emit(text)

        while (yield from source.until(self._tags, give)):
            source.record(self._tag_begin)
            found = yield from self._tag()
            if self._quotes_call(found):
                num_quoted += 1
            elif num_quoted:
                num_quoted -= found == _INVOKE_END
            elif (inside and is_blank and inside.may_begin(found, others)) or (
                found == f"/{tag}" and (yield from self._is_followed())
            ):
                source.forget()
                return found
            elif found in others or (found in self._open and (yield from self._is_followed())):
                source.feed_again(source.forget())
                return f"/{tag}"
            give(source.forget())
        return ""

    def _is_followed(self) -> Steps[bool]:
        """Says whether another tag follows, or nothing, and takes the white space before it."""
        source = self.source
        yield from source.skip_white_space()
        if source.is_end and source.at == len(source.text):
            return True
        return (yield from source.comes([self._tag_begin]))

    def _quotes_call(self, tag: str) -> bool:
        return tag.startswith(_INVOKE) and tag[len(_INVOKE) : -1] in self.tools

    def _next_tag(self) -> Steps[str]:
        """Takes the next tag and returns it without its brackets; "" where there is none."""
        yield from self.source.skip_white_space()
        if not (yield from self.source.takes(self._tag_begin)):
            return ""
        return (yield from self._tag())

    def _tag(self) -> Steps[str]:
        """Takes the rest of a tag, which may be a token of its own."""
        source = self.source
        char = yield from source.skip_white_space()
        if char and has_token(char):
            return self._plain(source.take(source.at + 1)).strip("<>")
        if char != "<":
            return ""
        source.take(source.at + 1)
        name, end = yield from source.read(_NAME_ENDS, MAX_NAME)
        return name.strip() if end else ""

    def _others(self, schema: Any, given: Collection[str]) -> Collection[str]:
        """Returns the properties of a schema that an object has not yet."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return set(properties) - set(given) if isinstance(properties, Mapping) else ()

    def _give_string(self, text: str) -> None:
        self.sink.arguments(json.dumps(self._plain(text), ensure_ascii=False)[1:-1])


@dataclass(frozen=True, slots=True)
class _Inside:
    """Says which elements may be in a value of this schema."""

    schema: Any
    root: Mapping[str, Any]

    def may_begin(self, tag: str, others: Collection[str]) -> bool:
        """Says whether a tag begins one. `others`: elements that may follow the value, where its
        end was left out."""
        if not tag or tag.startswith("/"):
            return False
        return tag not in others or part_of(self.schema, tag, self.root) is not None


def _leaf(text: str, types: frozenset[str]) -> str:
    """Returns a value without elements as JSON text. No text is an empty object or list."""
    if not text.strip() and "string" not in types:
        empty = {"object": "{}", "array": "[]", "null": "null"}
        return next((empty[kind] for kind in empty if kind in types), '""')
    return value_json(text, types or frozenset(["string"]))
