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
from collections.abc import Sequence

from decode_node.parsers.families.formats import HarmonyFormat
from decode_node.parsers.stages.call_stage import MAX_NAME
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.step_stage import MessageStage
from decode_node.parsers.text import json_reader
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.text_input import Steps, marker_set
from decode_node.protocol.chat.tools import Tool

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")
_FUNCTIONS = "functions."
_ROLE = "assistant"


class HarmonyStage(MessageStage):
    """Reads all of an answer: reasoning, content and calls. `is_open`: the prompt ends amid
    reasoning."""

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
        self._names = {tool.name for tool in tools}
        self._start, self._channel, self._message = map(
            marked, (form.start, form.channel, form.message)
        )
        ends = [marked(form.end), marked(form.call), marked(form.final)]
        headers = [self._start, self._channel]
        super().__init__(sink, headers, ends, is_open=is_open)
        self._analysis = f"{self._channel}analysis"
        self._in_headers = frozenset((*headers, self._message))
        behind_role = (self._channel, self._message, " to=")
        self._header_begins = (self._start, *behind_role, *(_ROLE + text for text in behind_role))
        self._any = marker_set(*headers, self._message, *ends)
        self._header_ends = marker_set(self._message, *ends)

    def run(self) -> Steps[None]:
        source = self.source
        if self.is_reasoning:
            yield from self.reasoning()
        while (yield from source.peek()):
            if not (yield from source.comes(self._header_begins)):
                marker = yield from source.until(self._any, self.sink.content)
                source.put_back(marker if marker in self._in_headers else "")
                continue
            source.record("")
            header, end = yield from source.read(self._header_ends, MAX_NAME)
            if end == self._message:
                yield from self._read_message(header)
            else:
                source.put_back(end)
                self.sink.content(source.forget())

    def _read_message(self, header: str) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        if name in self._names:
            self.source.forget()
            yield from self._call(name)
        elif recipient:
            self.sink.content(self.source.forget())
            self.sink.content((yield from self.body(self.sink.content)))
            self.paragraphs.last = ""
        elif self._analysis in header:
            self.source.forget()
            yield from self.reasoning()
        else:
            self.source.forget()
            yield from self.body(self.paragraphs.next("content", self.sink.content))

    def _call(self, name: str) -> Steps[None]:
        self.paragraphs.last = ""
        self.sink.call_start(name)
        is_empty, is_json = True, False

        def give(text: str) -> None:
            nonlocal is_empty
            is_empty = is_empty and not text.strip()
            self.sink.arguments(text)

        if (yield from self.source.peek()) == "{":
            is_json = yield from json_reader.value(self.source, give)
        end = yield from self.body(give)
        if end and is_empty:
            self.sink.arguments("{}")
        self.sink.call_end(is_complete=is_json or (bool(end) and is_empty))
