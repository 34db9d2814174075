"""Calls whose arguments are nearly JSON: keys are bare, and strings stand between tokens (Gemma 4).

    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3,places:[<|"|>a<|"|>],o:{k:true}}<tool_call|>

The arguments are composed as JSON, and strings are given while they come. Values that are JSON
already stay so. A bare word is read by the type that the tool's schema gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from decode_node.parsers.families.formats import BracedFormat
from decode_node.parsers.stages.call_stage import MAX_NAME, CallStage
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.text import json_reader
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.schema_types import parameter_types, value_json
from decode_node.parsers.text.text_input import Steps, marker_set
from decode_node.protocol.chat.tools import Tool

_WORD_END = re.compile("[,{}\\[\\]\ud800-\udfff]")
_KEY = re.compile(r"[\w.$@-]+")
_MAX_DEPTH = 64


class BracedStage(CallStage):
    """Reads calls of a `BracedFormat`."""

    def __init__(
        self, form: BracedFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        marked = markers.translate
        super().__init__(sink, tools, [marked(form.begin)], [marked(form.end)])
        self._plain = markers.plain
        self._before_name = marked(form.before_name)
        self._quote = marked(form.quote)
        self._quotes = marker_set(self._quote)
        self._name_ends = marker_set("{", marked(form.begin), marked(form.end))
        self._key_ends = marker_set(":", "{", "}", ",", marked(form.end))

    def call(self, marker: str) -> Steps[None]:
        source = self.source
        yield from source.skip_white_space()
        yield from source.takes(self._before_name)
        header, end = yield from source.read(self._name_ends, MAX_NAME)
        tool = self.tools.get(header.strip())
        if tool is None or end != "{":
            source.put_back(end)
            return self.reject()
        char = yield from source.skip_white_space()
        if not ((char and char in '}"') or _KEY.match(char) or self._quote.startswith(char)):
            return self.reject()
        self.accept(tool.name)
        is_complete = yield from self._pairs(tool, 0)
        return self.sink.call_end(is_complete=is_complete)

    def _pairs(self, tool: Tool | None, depth: int) -> Steps[bool]:
        """Reads an object behind its brace; says whether it is complete. `tool`: it is that one's
        arguments."""
        source, opening = self.source, "{"
        while (char := (yield from source.skip_white_space())) != "}":
            if char == "," and opening != "{":
                source.take(source.at + 1)
                continue
            key = yield from self._key()
            if key is None:
                return False
            self.sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            types = parameter_types(tool, key) if tool else frozenset[str]()
            if not (yield from self._value(types, depth)):
                return False
            opening = ", "
        source.take(source.at + 1)
        self.sink.arguments("{}" if opening == "{" else "}")
        return True

    def _key(self) -> Steps[str | None]:
        """Reads a key and its colon; None where there is none."""
        source = self.source
        char = yield from source.skip_white_space()
        if char == '"':
            key = yield from json_reader.text(source)
        elif (yield from source.takes(self._quote)):
            text, end = yield from source.read(self._quotes, MAX_NAME)
            key = self._plain(text) if end else None
        else:
            text, end = yield from source.read(self._key_ends, MAX_NAME)
            source.put_back(end)
            key = self._plain(text.strip())
        if not key or (yield from source.skip_white_space()) != ":":
            return None
        source.take(source.at + 1)
        return key

    def _value(self, types: frozenset[str], depth: int) -> Steps[bool]:
        """Gives one value; says whether it is complete."""
        source = self.source
        char = yield from source.skip_white_space()
        if depth > _MAX_DEPTH or not char:
            return False
        if char == '"':
            return (yield from json_reader.value(source, self.sink.arguments))
        if char == "{" or char == "[":
            source.take(source.at + 1)
            return (yield from (self._pairs if char == "{" else self._items)(None, depth + 1))
        if (yield from source.takes(self._quote)):
            self.sink.arguments('"')
            if not (yield from source.until(self._quotes, self._give_string)):
                return False
            self.sink.arguments('"')
            return True
        return (yield from self._word(types))

    def _items(self, _: Tool | None, depth: int) -> Steps[bool]:
        """Reads a list behind its bracket; says whether it is complete."""
        source, opening = self.source, "["
        while (char := (yield from source.skip_white_space())) != "]":
            if char == "," and opening != "[":
                source.take(source.at + 1)
                continue
            if not char:
                return False
            self.sink.arguments(opening)
            if not (yield from self._value(frozenset(), depth)):
                return False
            opening = ", "
        source.take(source.at + 1)
        self.sink.arguments("[]" if opening == "[" else "]")
        return True

    def _word(self, types: frozenset[str]) -> Steps[bool]:
        """Reads a number, a constant, or a text without quotes."""
        source, parts = self.source, list[str]()
        while not (match := _WORD_END.search(source.text, source.at)):
            parts.append(source.take(len(source.text)))
            if source.is_end:
                break
            yield
        if match:
            parts.append(source.take(match.start()))
        word = self._plain("".join(parts)).strip()
        is_complete = bool(match) and bool(word) and match is not None and match[0] in ",}]"
        self.sink.arguments(value_json(word, types) if is_complete else word)
        return is_complete

    def _give_string(self, text: str) -> None:
        self.sink.arguments(json.dumps(self._plain(text), ensure_ascii=False)[1:-1])
