"""Collects the deltas of one answer, and knows what belongs to no part of it.

White space next to a call belongs to the call's format: between content and a call, between calls,
and behind the last one it is dropped. Everything else is given as it came.
"""

from __future__ import annotations

from decode_node.parsers.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from decode_node.parsers.marked_text import MarkerTokens


class DeltaSink:
    """Takes what parsers find and gives it as deltas, with markers that mark nothing spelled out.

    Attributes:
        num_calls: Calls that have started.
        incomplete: `reasoning` or `call` when the answer ended inside of one, else "".
    """

    def __init__(self, markers: MarkerTokens, *, may_call: bool) -> None:
        self._markers = markers
        self._may_call = may_call
        self._deltas: list[Delta] = []
        self._blank = ""
        """White space that is dropped if a call follows."""
        self._is_behind_call = False
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
                if not self._is_behind_call:
                    self._blank += text
                return
            if self._is_behind_call:
                kept, self._is_behind_call = kept.lstrip(), False
            kept, self._blank = self._blank + kept, text[len(text.rstrip()) :]
            text = kept
        self._deltas.append(ContentText(self._markers.plain(text)))

    def call_start(self, name: str) -> None:
        self._blank = ""
        self._deltas.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self.num_calls - 1, self._markers.plain(text)))

    def call_end(self, *, is_complete: bool = True) -> None:
        self._is_behind_call = True
        if not is_complete:
            self.incomplete = "call"
        self._deltas.append(CallEnd(self.num_calls - 1, is_complete))

    def finish(self) -> None:
        """Gives the white space that no call followed."""
        if self._blank:
            self._deltas.append(ContentText(self._blank))
            self._blank = ""
