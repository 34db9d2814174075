"""Calls whose arguments are JSON: one object with the name inside, or a name and then the object.

<tool_call>{"name": "f", "arguments": {…}}</tool_call>                 JsonObjectStage
<TOOLCALL>[{"name": "f", "arguments": {…}}, …]</TOOLCALL>              JsonListStage
<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>                  NamedJsonStage
[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]   [TOOL_CALLS]f[ARGS]{…}   MistralStage
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from decode_node.parsers.families.formats import (
    JsonListFormat,
    JsonObjectFormat,
    MistralFormat,
    NamedJsonFormat,
)
from decode_node.parsers.stages.call_stage import MAX_NAME, CallStage
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.text import json_reader
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.text_input import Steps, marker_set
from decode_node.protocol.chat.tools import Tool

_ARGUMENTS = ("arguments", "parameters")
_VALUE_BEGIN = frozenset('{["-0123456789tfn')
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonStage(CallStage):
    """Reads arguments that are JSON, and objects that hold a name and arguments."""

    name_keys: tuple[str, ...] = ("name",)

    def object_call(self) -> Steps[bool]:
        """Reads an object that is a call; says whether it was one. The source stands at it.

        Keys come in any order and others are passed over, but arguments that come before the name
        wait for it. Behind the arguments nothing that follows can make the call another one.
        """
        source = self.source
        if (yield from source.skip_white_space()) != "{":
            return False
        source.take(source.at + 1)
        name: str | None = None
        early: list[str] | None = None
        while True:
            char = yield from source.skip_white_space()
            if char == "," or char == "}":
                source.take(source.at + 1)
                if char == ",":
                    continue
                break
            key = yield from json_reader.text(source)
            if key is None or (yield from source.skip_white_space()) != ":":
                return False
            source.take(source.at + 1)
            char = yield from source.skip_white_space()
            if key in self.name_keys:
                name = yield from json_reader.text(source)
                if name not in self.tools:
                    return False
            elif key in _ARGUMENTS and name is not None:
                if char not in _VALUE_BEGIN:
                    return False
                self.accept(name)
                if (yield from self.arguments()):
                    yield from self._rest_of_object()
                return True
            else:
                parts: list[str] = []
                if not (yield from json_reader.value(source, parts.append)):
                    return False
                early = parts if key in _ARGUMENTS else early
        if name is None:
            return False
        self.accept(name)
        self.whole_arguments("".join(early or ()))
        return True

    def arguments(self) -> Steps[bool]:
        """Reads the arguments of an accepted call and ends it; says whether they are complete."""
        first = yield from self.source.peek()
        if first == "{":
            is_complete = yield from json_reader.value(self.source, self.sink.arguments)
            self.sink.call_end(is_complete=is_complete)
            return is_complete
        parts: list[str] = []
        is_complete = yield from json_reader.value(self.source, parts.append)
        self.whole_arguments("".join(parts), is_complete=is_complete)
        return is_complete

    def whole_arguments(self, text: str, *, is_complete: bool = True) -> None:
        """Gives arguments that are there already, and ends the call. A string holds them encoded
        once more; none at all, and null, are an empty object."""
        if is_complete and text.startswith('"'):
            inner = json_reader.decoded(text)
            if inner is not None and inner.lstrip().startswith("{"):
                text = text if _SURROGATE.search(inner) else inner
        self.sink.arguments("{}" if is_complete and text in ("", "null") else text)
        self.sink.call_end(is_complete=is_complete)

    def _rest_of_object(self) -> Steps[None]:
        """Takes what is left of the object behind its arguments, as long as it looks like one."""
        source, ignored = self.source, list[str]()
        while (char := (yield from source.skip_white_space())) == "," or char == "}":
            source.take(source.at + 1)
            if char == "}":
                return
            if (yield from source.skip_white_space()) != '"':
                return
            yield from json_reader.value(source, ignored.append)
            if (yield from source.skip_white_space()) == ":":
                source.take(source.at + 1)
                yield from source.skip_white_space()
                yield from json_reader.value(source, ignored.append)


class JsonObjectStage(JsonStage):
    """Reads one object a call, between markers, or bare at the beginning of an answer."""

    def __init__(
        self, form: JsonObjectFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        self._end = markers.translate(form.end)
        ends = [self._end] if form.end else []
        super().__init__(sink, tools, [markers.translate(form.begin)], ends)
        self._form = form

    def begin(self) -> Steps[None]:
        if self._form.may_be_bare:
            yield from self._bare_calls()

    def call(self, marker: str) -> Steps[None]:
        if self._form.may_be_bare and self._end:
            # Llama 4 may write both markers in front of the object.
            yield from self.source.skip_white_space()
            yield from self.source.takes(self._end)
        if not (yield from self.object_call()):
            self.reject()
        elif self._form.may_be_bare:
            yield from self._bare_calls()

    def _bare_calls(self) -> Steps[None]:
        """Reads calls without a marker, one after the other."""
        source = self.source
        while True:
            source.record("")
            char = yield from source.skip_white_space()
            if char == self._form.separator.strip() and self.sink.is_behind_call:
                source.take(source.at + 1)
                char = yield from source.skip_white_space()
            if char != "{" or not (yield from self.object_call()):
                self.reject()
                return


class JsonListStage(JsonStage):
    """Reads one list of objects between markers, or the objects alone."""

    def __init__(
        self, form: JsonListFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        ends = [markers.translate(form.end)] if form.end else []
        super().__init__(sink, tools, [markers.translate(form.begin)], ends)
        self.name_keys = ("name", form.name_key)
        self._is_keyed = not form.name_key
        self._is_bare = not form.begin

    def begin(self) -> Steps[None]:
        if self._is_bare:
            self.source.record("")
            yield from self.call("")

    def call(self, marker: str) -> Steps[None]:
        source = self.source
        is_list = (yield from source.skip_white_space()) == "["
        if is_list:
            source.take(source.at + 1)
        elif self._is_bare:
            return self.reject()
        read = self._keyed_call if self._is_keyed else self.object_call
        while (yield from read()):
            source.record("")
            char = yield from source.skip_white_space()
            if char == "]" or char == ",":
                source.take(source.at + 1)
            if char != "," and (is_list or char != "{"):
                source.forget()
                return None
        return self.reject()

    def _keyed_call(self) -> Steps[bool]:
        """Reads an object whose only key is the function's name."""
        source = self.source
        if (yield from source.skip_white_space()) != "{":
            return False
        source.take(source.at + 1)
        yield from source.skip_white_space()
        name = yield from json_reader.text(source)
        if name is None or name not in self.tools:
            return False
        if (yield from source.skip_white_space()) != ":":
            return False
        source.take(source.at + 1)
        if (yield from source.skip_white_space()) != "{":
            return False
        self.accept(name)
        if (yield from self.arguments()) and (yield from source.skip_white_space()) == "}":
            source.take(source.at + 1)
        return True


class NamedJsonStage(JsonStage):
    """Reads a name between markers, and then the arguments."""

    def __init__(
        self, form: NamedJsonFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        begin, end, after_name, section, section_end = map(
            markers.translate,
            (form.begin, form.end, form.after_name, form.section_begin, form.section_end),
        )
        super().__init__(sink, tools, [begin, section], [end, section_end])
        self._form = form
        self._begin, self._end, self._section = begin, end, section
        self._before_name = markers.translate(form.before_name)
        self._id_end = markers.translate(form.id_end)
        self._name_ends = marker_set(after_name.rstrip() or after_name, begin, end, section_end)
        self._after_name = after_name.rstrip() or after_name

    def begin(self) -> Steps[None]:
        heads = [name + self._after_name for name in self.tools]
        if self._form.may_be_bare and not (heads and (yield from self.source.comes(heads))):
            return
        if self._form.may_be_bare or self._form.content_name:
            self.source.record("")
            yield from self.call(self._begin)

    def call(self, marker: str) -> Steps[None]:
        source = self.source
        if not (yield from self.enters(marker, self._section, self._begin)):
            return self.reject()
        yield from source.skip_white_space()
        yield from source.takes(self._before_name)
        header, end = yield from source.read(self._name_ends, MAX_NAME)
        if end != self._after_name:
            source.put_back(end)
            return self.reject()
        name = header.strip()
        if name and name == self._form.content_name:
            source.forget()
            return None
        if self._id_end:
            name = name.rpartition(self._id_end)[2].strip()
        if self._form.numbers_calls:
            name = name.rpartition(":")[0] or name
        if name not in self.tools:
            return self.reject()
        if (yield from source.skip_white_space()) == "{":
            self.accept(name)
            yield from self.arguments()
            yield from self._skip_behind_arguments()
            return None
        yield from self._skip_behind_arguments()
        if self._form.may_be_bare or not (yield from source.takes(self._end)):
            return self.reject()
        self.accept(name)
        self.whole_arguments("")
        return None

    def _skip_behind_arguments(self) -> Steps[None]:
        if self._form.after_arguments:
            yield from self.source.skip_white_space()
            yield from self.source.takes(self._form.after_arguments.strip())
            yield from self.source.skip_white_space()


class MistralStage(JsonStage):
    """Reads an array of objects, as older models write it, or a name and then the arguments."""

    def __init__(
        self, form: MistralFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        self._begin, self._args, self._id = map(
            markers.translate, (form.begin, form.arguments, form.call_id)
        )
        super().__init__(sink, tools, [self._begin], [])
        self._name_ends = marker_set(self._args, self._id, self._begin, "{")
        self._id_ends = marker_set(self._args, self._begin, "{")

    def call(self, marker: str) -> Steps[None]:
        char = yield from self.source.skip_white_space()
        if char == "[":
            self.source.take(self.source.at + 1)
            yield from self._array()
        elif char == "{":
            if not (yield from self.object_call()):
                self.reject()
        else:
            yield from self._named()

    def _array(self) -> Steps[None]:
        """Reads objects up to the closing bracket. One that is no call ends the array."""
        source = self.source
        while (yield from self.object_call()):
            source.record("")
            char = yield from source.skip_white_space()
            if char == "]":
                source.take(source.at + 1)
            if char != ",":
                source.forget()
                return
            source.take(source.at + 1)
        self.reject()

    def _named(self) -> Steps[None]:
        source = self.source
        header, end = yield from source.read(self._name_ends, MAX_NAME)
        if end == self._id:
            _, end = yield from source.read(self._id_ends, MAX_NAME)
        if header.strip() not in self.tools or end not in (self._args, "{"):
            source.put_back(end if end == self._begin else "")
            return self.reject()
        if end == "{":
            source.put_back(end)
        elif (yield from source.skip_white_space()) != "{":
            return self.reject()
        self.accept(header.strip())
        yield from self.arguments()
        return None
