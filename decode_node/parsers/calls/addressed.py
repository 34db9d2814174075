"""Messages that say whom they are for (Muse): the model itself, the user, or a function.

     to=self<|message|>I should look.<|eom|>                                          reasoning
    <|start|>assistant to=user<|message|>One moment.<|eom|>                           content
    <|start|>assistant to=f<|message|><atem:function_calls>…</atem:function_calls><|eot|>   a call

What is not for the model itself is read by another stage, which knows calls. Headers are no part of
the answer. Two messages of one kind in a row are two paragraphs.
"""

from __future__ import annotations

import re

from decode_node.parsers.families.formats import AddressFormat
from decode_node.parsers.stages.call_stage import MAX_NAME
from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.stage import Stage
from decode_node.parsers.stages.step_stage import MessageStage
from decode_node.parsers.text.marked_text import MarkerTokens
from decode_node.parsers.text.text_input import Steps, marker_set

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")


class AddressedStage(MessageStage):
    """Reads all of an answer. `is_open`: the prompt ends amid reasoning.

    Args:
        follow: Reads the bodies of all other messages.
    """

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
        self._start, self._message = marked(form.start), marked(form.message)
        ends = [marked(form.end), marked(form.last)]
        super().__init__(sink, [self._start], ends, is_open=is_open)
        self._follow = follow
        self._oneself, self._user = form.oneself, form.user
        to = marked(form.to)
        self._header_begins = (self._start, self._message, to, to.lstrip(), form.role + to)
        self._header_ends = marker_set(self._message, *ends)

    def finish(self) -> None:
        super().finish()
        self._follow.finish()

    def run(self) -> Steps[None]:
        if self.is_reasoning:
            yield from self.reasoning()
        while (yield from self.source.peek()):
            recipient = yield from self._recipient()
            if recipient == self._oneself:
                yield from self.reasoning()
            elif recipient == self._user:
                yield from self.body(self.paragraphs.next("content", self._follow.push))
            else:
                self.paragraphs.last = ""
                yield from self.body(self._follow.push)

    def _recipient(self) -> Steps[str]:
        """Takes a header and returns whom the message is for; "" where there is no header."""
        source = self.source
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
