"""Calls that are written as in Python: `[f(a=1), g(b="x")]`, nothing but literals as arguments.

Such a list is all of an answer, or stands between markers. Each argument is given when it is
complete, as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from decode_node.parsers.families.formats import PythonicFormat
from decode_node.parsers.stages.call_stage import MAX_NAME, CallStage
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.schema_types import literal_json
from decode_node.parsers.text.text_input import MarkerSet, Steps
from decode_node.protocol.chat.tools import Tool

_MARKERS = "\ud800-\udfff"
_STRUCTURE = re.compile(f"[\"'(){{}}\\[\\],{_MARKERS}]")
_STRING_END = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_NAME_ENDS = MarkerSet(["(", "[", "]"])
_KEY_ENDS = MarkerSet(["=", ")", "("])


class PythonicStage(CallStage):
    """Reads lists of calls."""

    def __init__(
        self, form: PythonicFormat, sink: DeltaSink, tools: Sequence[Tool], markers: MarkerTokens
    ) -> None:
        begins = [markers.translate(form.begin)] if form.begin else []
        ends = [markers.translate(form.end)] if form.end else []
        super().__init__(sink, tools, begins, ends)
        self._has_brackets = form.opening == "["

    def begin(self) -> Steps[None]:
        if self._has_brackets:
            self.source.record("")
            yield from self._list()

    def call(self, marker: str) -> Steps[None]:
        yield from self._list()

    def _list(self) -> Steps[None]:
        source = self.source
        if self._has_brackets:
            if (yield from source.skip_white_space()) != "[":
                return self.reject()
            source.take(source.at + 1)
        while (yield from self._one()):
            source.record("")
            char = yield from source.skip_white_space()
            if char and char in "],":
                source.take(source.at + 1)
            is_over = char != "," if self._has_brackets else not (char.isalpha() or char == "_")
            if is_over:
                source.forget()
                return None
        return self.reject()

    def _one(self) -> Steps[bool]:
        """Reads one call; says whether it was one."""
        source = self.source
        yield from source.skip_white_space()
        header, end = yield from source.read(_NAME_ENDS, MAX_NAME)
        name = header.strip()
        if end != "(" or name not in self.tools:
            return False
        opening = "{"
        while (char := (yield from source.skip_white_space())) != ")":
            if char == "," and opening != "{":
                source.take(source.at + 1)
                continue
            key, end = yield from source.read(_KEY_ENDS, MAX_NAME)
            value = (yield from self._value()) if end == "=" else None
            if value is None or not key.strip().isidentifier():
                if opening == "{":
                    return False
                self.sink.call_end(is_complete=False)
                return True
            if opening == "{":
                self.accept(name)
            self.sink.arguments(f'{opening}"{key.strip()}": {value}')
            opening = ", "
        source.take(source.at + 1)
        if opening == "{":
            self.accept(name)
        self.sink.arguments("{}" if opening == "{" else "}")
        self.sink.call_end()
        return True

    def _value(self) -> Steps[str | None]:
        """Reads a literal and returns it as JSON; None if it is none or not complete."""
        parts: list[str] = []
        if not (yield from self._expression(parts)):
            return None
        try:
            return literal_json("".join(parts))
        except ValueError:
            return None

    def _expression(self, parts: list[str]) -> Steps[bool]:
        """Reads up to a comma or a bracket that is not within; says whether one came."""
        source, depth = self.source, 0
        while True:
            match = _STRUCTURE.search(source.text, source.at)
            if match is None:
                parts.append(source.take(len(source.text)))
                if source.is_end:
                    return False
                yield
                continue
            parts.append(source.take(match.start()))
            char = match[0]
            if char in "\"'":
                if not (yield from self._string(char, parts)):
                    return False
                continue
            if char >= "\ud800" and char <= "\udfff":
                return False
            if depth == 0 and char in ",)]}":
                return char in ",)"
            depth += (char in "([{") - (char in ")]}")
            parts.append(source.take(source.at + 1))

    def _string(self, quote: str, parts: list[str]) -> Steps[bool]:
        """Reads a string with its quotes, of which there may be three."""
        source = self.source
        end = quote
        for marker in (3 * quote, 2 * quote):
            if (yield from source.takes(marker)):
                parts.append(marker)
                if len(marker) == 2:
                    return True
                end = marker
                break
        else:
            parts.append(source.take(source.at + 1))
        while True:
            match = _STRING_END[quote].search(source.text, source.at)
            if match is None:
                parts.append(source.take(len(source.text)))
                if source.is_end:
                    return False
                yield
                continue
            parts.append(source.take(match.start()))
            if match[0] == "\\":
                while len(source.text) - source.at < 2:
                    if source.is_end:
                        return False
                    yield
                parts.append(source.take(source.at + 2))
            elif (yield from source.takes(end)):
                parts.append(end)
                return True
            else:
                parts.append(source.take(source.at + 1))
