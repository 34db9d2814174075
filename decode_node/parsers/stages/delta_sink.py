"""Collects the deltas of one answer, and knows what belongs to no part of it.

White space next to a call belongs to the call's format. It waits until more content comes, which it
then separates from what was before; at the edges of all content it is dropped. Everything else is
given as it came.
"""

from __future__ import annotations

from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from decode_node.parsers.text.marked_text import MarkerTokens


class DeltaSink:
    """Takes what parsers find and gives it as deltas, with markers that mark nothing spelled out.

    Attributes:
        num_calls: Calls that have started.
        is_behind_call: Nothing but white space came since a call has ended.
        incomplete: `reasoning` or `call` when one broke off, else "".
    """

    def __init__(self, markers: MarkerTokens, *, may_call: bool) -> None:
        self._markers = markers
        self._may_call = may_call
        self._deltas: list[Delta] = []
        self._blank: list[str] = []
        """White space that waits for what follows."""
        self._has_content = False
        self.is_behind_call = False
        self.num_calls = 0
        self.incomplete = ""

    def take(self) -> list[Delta]:
        """Returns the deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningText(self._markers.plain(text)))

    def content(self, text: str) -> None:
        if not text:
            return
        if self._may_call:
            kept = text.rstrip()
            if not kept:
                self._blank.append(text)
                return
            blank, self._blank = "".join(self._blank), [text[len(kept) :]]
            is_edge = self.is_behind_call and not self._has_content
            text = kept.lstrip() if is_edge else blank + kept
            self.is_behind_call, self._has_content = False, True
        self._deltas.append(ContentText(self._markers.plain(text)))

    def call_start(self, name: str) -> None:
        self._deltas.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self.num_calls - 1, self._markers.plain(text)))

    def call_end(self, *, is_complete: bool = True) -> None:
        self.is_behind_call = True
        if not is_complete:
            self.incomplete = "call"
        self._deltas.append(CallEnd(self.num_calls - 1, is_complete))

    def finish(self) -> None:
        """Gives the white space at the end, unless it is a call's."""
        blank = "".join(self._blank)
        if blank and not self.is_behind_call:
            self._deltas.append(ContentText(blank))
        self._blank = []
