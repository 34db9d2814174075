"""Calls whose arguments have tags of their own, and values that are text.

    <tool_call><function=f><parameter=p>value</parameter></function></tool_call>
    <tool_call>f<arg_key>p</arg_key><arg_value>value</arg_value></tool_call>
    <｜DSML｜invoke name="f"><｜DSML｜parameter name="p" string="true">value</｜DSML｜parameter>…

The arguments are composed as JSON. A value that is a string is given while it comes; the others
have to be complete to be understood. Values are not escaped, so what ends one is decided like this:

    a closing tag     if the end of the call follows it, or the next parameter; in a value that has
                      begun to quote parameters, the next one must be one of the schema's
    a begin tag       of a parameter of the schema that the call has not yet: its closing tag was
                      left out
    anything else     is text, and so is all of a call of a known function that the value quotes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from decode_node.parsers.families.formats import XmlFormat
from decode_node.parsers.stages.call_stage import MAX_NAME, CallStage
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.schema_types import is_text, parameter_types, value_json
from decode_node.parsers.text.text_input import Steps, marker_set
from decode_node.protocol.chat.tools import Tool


class XmlStage(CallStage):
    """Reads calls of an `XmlFormat`."""

    def __init__(
        self, form: XmlFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        marked = markers.translate
        section, before_name = marked(form.section_begin), marked(form.before_name)
        self._end, self._section_end = marked(form.end), marked(form.section_end)
        begins = [section, before_name] if section else [before_name]
        ends = [self._end, self._section_end] if section else [self._end]
        super().__init__(sink, tools, begins, ends)
        self._form = form
        self._plain = markers.plain
        self._section, self._before_name = section, before_name
        self._after_name = marked(form.after_name)
        self._header_ends = marker_set(marked(form.header_end))
        self._before_key = marked(form.before_key)
        self._before_value = marked(form.before_value)
        self._after_value = marked(form.after_value)
        self._name_ends = marker_set(self._after_name or self._before_key, *ends)
        self._key_ends = marker_set(marked(form.after_key))
        self._value_marks = [self._after_value, self._end, self._before_key, before_name]
        self._value_begins = marker_set(self._before_value)
        self._behind_value = [self._before_key, *ends]
        self._behind_call = [text for text in (self._section_end, before_name) if text]
        self._ends_values = bool(section) or len(self._end) == 1
        """The end of a call ends a value that was not closed, too."""
        self._given: set[str] = set()
        """Parameters that the call has so far."""

    def call(self, marker: str) -> Steps[None]:
        source = self.source
        name, end = yield from self.header(
            marker, self._section, self._before_name, self._name_ends
        )
        tool = self._tool(name)
        if end != self._after_name:
            source.put_back(end)
        if tool is None or not end or (self._after_name and end != self._after_name):
            return self.reject()
        if self._form.header_end:
            yield from source.read(self._header_ends, MAX_NAME)
        yield from source.skip_white_space()
        if not (yield from source.comes(self._behind_value)):
            return self.reject()
        self.accept(tool.name)
        yield from self._arguments(tool)
        return None

    def _tool(self, name: str) -> Tool | None:
        """Returns the function of this name. Where calls are messages, prompts list recipients as
        `f.*`, and models write `f.f`."""
        first, _, rest = name.partition(".")
        if name not in self.tools and self._form.messages and first == rest:
            name = first
        return self.tools.get(name)

    def _arguments(self, tool: Tool) -> Steps[None]:
        source, opening = self.source, "{"
        self._given.clear()
        while True:
            yield from source.skip_white_space()
            if (yield from source.takes(self._before_key)):
                if not (yield from self._argument(tool, opening)):
                    return self.sink.call_end(is_complete=False)
                opening = ", "
            elif (yield from self._takes_end()):
                self.sink.arguments("{}" if opening == "{" else "}")
                return self.sink.call_end()
            else:
                return self.sink.call_end(is_complete=False)

    def _takes_end(self) -> Steps[bool]:
        """Takes the end of the call. That of the section is one too, and stays."""
        if (yield from self.source.takes(self._end)):
            self._awaits_end = bool(self._section)
            return True
        if not self._section:
            return False
        return (yield from self.source.comes([self._section_end]))

    def _argument(self, tool: Tool, opening: str) -> Steps[bool]:
        """Reads one parameter; says whether it is complete."""
        source, form = self.source, self._form
        key, end = yield from source.read(self._key_ends, MAX_NAME)
        attributes = ""
        if end and self._before_value:
            attributes, end = yield from source.read(self._value_begins, MAX_NAME)
        if not end:
            return False
        key = form.read_key(self._plain(key.strip()))
        self._given.add(key)
        self.sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        types = parameter_types(tool, key)
        has_mark = bool(form.text_mark)
        if form.text_mark in attributes if has_mark else is_text(types, is_json=form.is_json):
            return (yield from self._string(tool, key))
        parts: list[str] = []
        is_complete = yield from self._value(tool, key, parts.append)
        value = self._plain("".join(parts))
        self.sink.arguments(value_json(value, types) if is_complete else value)
        return is_complete

    def _string(self, tool: Tool, key: str) -> Steps[bool]:
        self.sink.arguments('"')
        is_complete = yield from self._value(tool, key, self._give_string)
        if is_complete:
            self.sink.arguments('"')
        return is_complete

    def _give_string(self, text: str) -> None:
        self.sink.arguments(json.dumps(self._plain(text), ensure_ascii=False)[1:-1])

    def _value(self, tool: Tool, key: str, emit: Callable[[str], object]) -> Steps[bool]:
        """Gives the value to `emit` and takes its end tag; says whether that came."""
        source, wrong_end = self.source, f"</{key}>"
        give = _Lines(emit, are_written=self._form.has_lines)
        marks = marker_set(*self._value_marks, wrong_end)
        num_calls = num_keys = 0
        """Calls and parameters that the value quotes, and has not closed."""
        while marker := (yield from source.until(marks, give)):
            if marker == self._before_name:
                source.record(marker)
                name, _ = yield from source.read(self._name_ends, MAX_NAME)
                num_calls += name.strip() in self.tools
                give(source.forget())
            elif num_calls:
                num_calls -= marker == self._end
                give(marker)
            elif marker == self._before_key:
                source.put_back(marker)
                if (yield from self._is_next(tool)):
                    return True
                give(source.take(source.at + len(marker)))
                num_keys += 1
            else:
                is_end, taken = yield from self._ends(marker, tool, is_quoting=num_keys > 0)
                if is_end:
                    give.end()
                    return True
                num_keys -= num_keys > 0
                give(taken)
        give.end()
        return False

    def _ends(self, marker: str, tool: Tool, *, is_quoting: bool) -> Steps[tuple[bool, str]]:
        """Returns whether a closing tag ends the value, and the text that was taken with it."""
        source = self.source
        source.record(marker)
        yield from source.skip_white_space()
        taken = source.forget()
        if source.is_end and source.at == len(source.text):
            is_end = marker != self._end or self._ends_values
        elif marker == self._end:
            is_end = self._ends_values and (yield from source.comes(self._behind_call))
        elif (yield from source.comes(self._behind_value[1:])):
            is_end = True
        elif (yield from source.comes(self._behind_value)):
            is_end = not is_quoting or (yield from self._is_next(tool))
        else:
            is_end = False
        if is_end and marker == self._end:
            source.feed_again(taken)
        return is_end, taken

    def _is_next(self, tool: Tool) -> Steps[bool]:
        """Says whether the parameter whose tag comes next is one that the schema knows and the call
        has not yet."""
        source = self.source
        source.record("")
        source.take(source.at + len(self._before_key))
        key, end = yield from source.read(self._key_ends, MAX_NAME)
        source.feed_again(source.forget())
        properties = tool.parameters.get("properties")
        name = self._form.read_key(self._plain(key.strip()))
        is_known = isinstance(properties, Mapping) and name in properties
        return bool(end) and is_known and name not in self._given


class _Lines:
    """Passes the text of a value on, without the line break behind one that no tag ends, and, where
    forms write values on lines of their own (`are_written`), without one at either end."""

    def __init__(self, emit: Callable[[str], object], *, are_written: bool) -> None:
        self._emit = emit
        self._are_written = are_written
        self._is_at_beginning = are_written
        self._kept = ""

    def __call__(self, text: str) -> None:
        if not text:
            return
        if self._is_at_beginning:
            self._is_at_beginning = False
            text = text.removeprefix("\n")
        text = self._kept + text
        self._kept = "\n" if text.endswith("\n") else ""
        if text := text.removesuffix("\n"):
            self._emit(text)

    def end(self) -> None:
        """The value has its end tag, or will have none."""
        if self._kept and not self._are_written:
            self._emit(self._kept)
            self._kept = ""
