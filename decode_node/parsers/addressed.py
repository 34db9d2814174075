"""Messages that say whom they are for (Muse): the model itself, the user, or a function.

     to=self<|message|>I should look.<|eom|>                                          reasoning
    <|start|>assistant to=user<|message|>One moment.<|eom|>                           content
    <|start|>assistant to=f<|message|><atem:function_calls>…</atem:function_calls><|eot|>   a call

What is not for the model itself is read by another stage, which knows calls. Headers are no part of
the answer. Two messages of one kind in a row are two paragraphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from decode_node.parsers.call_stage import MAX_NAME
from decode_node.parsers.delta_sink import DeltaSink
from decode_node.parsers.formats import AddressFormat
from decode_node.parsers.marked_text import MarkerTokens
from decode_node.parsers.paragraphs import Paragraphs
from decode_node.parsers.stage import Stage
from decode_node.parsers.text_input import MarkerSet, Steps, TextInput

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")


class AddressedStage:
    """Reads all of an answer. `is_open`: the prompt ends amid reasoning.

    Args:
        follow: Reads the bodies of all other messages.
    """

    is_undecided = False

    def __init__(
        self,
        form: AddressFormat,
        sink: DeltaSink,
        follow: Stage,
        markers: MarkerTokens,
        *,
        is_open: bool = False,
    ) -> None:
        marked = markers.translate
        self.is_reasoning = is_open
        self._sink = sink
        self._follow = follow
        self._oneself, self._user = form.oneself, form.user
        self._start, self._message = marked(form.start), marked(form.message)
        ends = [marked(form.end), marked(form.last)]
        to = marked(form.to)
        self._header_begins = (self._start, self._message, to, to.lstrip(), form.role + to)
        self._header_ends = MarkerSet([self._message, *ends])
        self._body_ends = MarkerSet([self._start, *ends])
        self._source = TextInput()
        self._paragraphs = Paragraphs()
        self._steps = self._run()

    def push(self, text: str) -> None:
        self._source.feed(text)
        next(self._steps)

    def finish(self) -> None:
        self._source.is_end = True
        next(self._steps, None)
        self._follow.finish()

    def _run(self) -> Steps[None]:
        if self.is_reasoning:
            yield from self._reasoning()
        while (yield from self._source.peek()):
            recipient = yield from self._recipient()
            if recipient == self._oneself:
                yield from self._reasoning()
            elif recipient == self._user:
                yield from self._body(self._paragraphs.next("content", self._follow.push))
            else:
                self._paragraphs.last = ""
                yield from self._body(self._follow.push)

    def _recipient(self) -> Steps[str]:
        """Takes a header and returns whom the message is for; "" where there is no header."""
        source = self._source
        if not (yield from source.comes(self._header_begins)):
            return ""
        source.record("")
        header, end = yield from source.read(self._header_ends, MAX_NAME)
        taken = source.forget()
        if end != self._message:
            self._follow.push(taken.removesuffix(end))
            return ""
        found = _RECIPIENT.search(header)
        return found[1] if found else self._user

    def _reasoning(self) -> Steps[None]:
        self.is_reasoning = True
        end = yield from self._body(self._paragraphs.next("reasoning", self._sink.reasoning))
        if not end:
            self._sink.incomplete = "reasoning"
        self.is_reasoning = False

    def _body(self, emit: Callable[[str], object]) -> Steps[str]:
        """Gives the body of a message to `emit` and returns the marker that ended it; one that
        begins the next message stays."""
        marker = yield from self._source.until(self._body_ends, emit)
        self._source.put_back(marker if marker == self._start else "")
        return marker
