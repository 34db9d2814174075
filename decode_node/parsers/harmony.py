"""The messages of gpt-oss: each has a channel, and a call has a recipient.

    <|channel|>analysis<|message|>I should look.<|end|>                              reasoning
    <|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>             content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>                 content

The recipient may stand before the channel as well, and a header may lack its `<|start|>`. A message
to one that is no function of the request is content, with its header. Two messages of one kind
in a row are two paragraphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from decode_node.parsers import json_reader
from decode_node.parsers.call_stage import MAX_NAME
from decode_node.parsers.delta_sink import DeltaSink
from decode_node.parsers.formats import HarmonyFormat
from decode_node.parsers.marked_text import MarkerTokens
from decode_node.parsers.paragraphs import Paragraphs
from decode_node.parsers.text_input import MarkerSet, Steps, TextInput
from decode_node.protocol.tools import Tool

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")
_FUNCTIONS = "functions."
_ROLE = "assistant"


class HarmonyStage:
    """Reads all of an answer: reasoning, content and calls. `is_open`: the prompt ends amid
    reasoning."""

    is_undecided = False

    def __init__(
        self,
        form: HarmonyFormat,
        sink: DeltaSink,
        tools: Sequence[Tool],
        markers: MarkerTokens,
        *,
        is_open: bool = False,
    ) -> None:
        marked = markers.translate
        self.is_reasoning = is_open
        self._sink = sink
        self._names = {tool.name for tool in tools}
        self._start, self._channel, self._message = map(
            marked, (form.start, form.channel, form.message)
        )
        ends = [marked(form.end), marked(form.call), marked(form.final)]
        headers = [self._start, self._channel]
        self._analysis = f"{self._channel}analysis"
        self._begins = frozenset((*headers, self._message))
        behind_role = (self._channel, self._message, " to=")
        self._header_begins = (self._start, *behind_role, *(_ROLE + text for text in behind_role))
        self._any = MarkerSet([*headers, self._message, *ends])
        self._header_ends = MarkerSet([self._message, *ends])
        self._body_ends = MarkerSet([*headers, *ends])
        self._source = TextInput()
        self._paragraphs = Paragraphs()
        self._steps = self._run()

    def push(self, text: str) -> None:
        self._source.feed(text)
        next(self._steps)

    def finish(self) -> None:
        self._source.is_end = True
        next(self._steps, None)

    def _run(self) -> Steps[None]:
        source = self._source
        if self.is_reasoning:
            yield from self._reasoning()
        while (yield from source.peek()):
            if not (yield from source.comes(self._header_begins)):
                marker = yield from source.until(self._any, self._sink.content)
                source.put_back(marker if marker in self._begins else "")
                continue
            source.record("")
            header, end = yield from source.read(self._header_ends, MAX_NAME)
            if end == self._message:
                yield from self._read_message(header)
            else:
                source.put_back(end)
                self._sink.content(source.forget())

    def _read_message(self, header: str) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        if name in self._names:
            self._source.forget()
            yield from self._call(name)
        elif recipient:
            self._sink.content(self._source.forget())
            self._sink.content((yield from self._body(self._sink.content)))
            self._paragraphs.last = ""
        elif self._analysis in header:
            self._source.forget()
            yield from self._reasoning()
        else:
            self._source.forget()
            yield from self._body(self._paragraphs.next("content", self._sink.content))

    def _reasoning(self) -> Steps[None]:
        self.is_reasoning = True
        end = yield from self._body(self._paragraphs.next("reasoning", self._sink.reasoning))
        if not end:
            self._sink.incomplete = "reasoning"
        self.is_reasoning = False

    def _call(self, name: str) -> Steps[None]:
        self._paragraphs.last = ""
        self._sink.call_start(name)
        is_empty, is_json = True, False

        def give(text: str) -> None:
            nonlocal is_empty
            is_empty = is_empty and not text.strip()
            self._sink.arguments(text)

        if (yield from self._source.peek()) == "{":
            is_json = yield from json_reader.value(self._source, give)
        end = yield from self._body(give)
        if end and is_empty:
            self._sink.arguments("{}")
        self._sink.call_end(is_complete=is_json or (bool(end) and is_empty))

    def _body(self, emit: Callable[[str], object]) -> Steps[str]:
        """Gives the body of a message to `emit` and returns the marker that ended it; one that
        begins the next message stays."""
        marker = yield from self._source.until(self._body_ends, emit)
        self._source.put_back(marker if marker in self._begins else "")
        return marker
