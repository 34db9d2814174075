"""Splits reasoning from what follows it.

        at the beginning ── white space, begin marker ──▶ open ── end marker ──▶ closed
               └─────────────── end marker, anything else ────────────────────────▶

An answer has one stretch of reasoning, at its beginning: open from the start where the prompt ends
with the begin marker, which the model may then write once more. A model that decides not to think
may write the end marker alone (MiniMax-M3). Markers later on are content. Without an end marker all
of the answer is reasoning.

A call ends reasoning too, where its begin marker is a token: models forget the end marker, and what
they then call would never run. A token alone ends nothing, because models think about their own
markers: what follows it waits, until it is certain to be a call of a function that the request
offers, and else is reasoning. Calls that are only text in reasoning are reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.deltas import CallStart
from decode_node.parsers.stages.stage import Stage
from decode_node.parsers.text.text_input import marker_set


class ReasoningStage:
    """Gives reasoning to the sink and the rest to the next stage.

    Args:
        begin, end: Markers, as marked text.
        ends_before: A marker that ends reasoning and belongs to the next stage already, whatever
            follows it.
        call_tokens: Markers that begin a call, and are tokens or have one in them.
        try_call: Makes a stage like the next one, and the sink that it gives to.
    """

    def __init__(
        self,
        begin: str,
        end: str,
        sink: DeltaSink,
        follow: Stage,
        *,
        is_open: bool,
        ends_before: str = "",
        call_tokens: Collection[str] = (),
        try_call: Callable[[], tuple[Stage, DeltaSink]] | None = None,
    ) -> None:
        self._begin = begin
        self._ends = [end, *([ends_before] if ends_before else [])]
        self._sink = sink
        self._follow = follow
        self._call_tokens = frozenset(call_tokens)
        self._marks = marker_set(*sorted({*self._ends, *self._call_tokens}))
        self._try_call = try_call
        self._trial: tuple[Stage, DeltaSink] | None = None
        """Reads the text that may be a call, which `_kept` holds."""
        self._blank: list[str] = []
        """White space before anything else."""
        self._kept = ""
        self._is_at_beginning = True
        self.is_reasoning = is_open

    @property
    def is_undecided(self) -> bool:
        return self._trial is not None

    def push(self, text: str) -> None:
        if self._is_at_beginning:
            if not self._kept and text.isspace():
                self._blank.append(text)
                return
            text, self._kept = self._kept + text, ""
            text = self._skip_begin(text)
        while text and self.is_reasoning:
            text = self._try(text) if self._trial else self._push_reasoning(text)
        if text:
            self._follow.push(text)

    def finish(self) -> None:
        kept, self._kept = "".join(self._blank) + self._kept, ""
        if self.is_reasoning:
            self._sink.reasoning(kept)
            self._sink.incomplete = "reasoning"
        elif kept:
            self._follow.push(kept)
        self._follow.finish()

    def _skip_begin(self, text: str) -> str:
        """Returns what is behind the begin marker, if there is one; keeps back what may be one."""
        stripped = text.lstrip()
        if stripped.startswith(self._begin):
            self.is_reasoning = True
            text = stripped[len(self._begin) :]
        elif not self.is_reasoning and stripped.startswith(self._ends[0]):
            text = stripped[len(self._ends[0]) :]
        elif self._begin.startswith(stripped) or self._ends[0].startswith(stripped):
            self._kept = text
            return ""
        else:
            text = "".join(self._blank) + text
        self._blank = []
        self._is_at_beginning = False
        return text

    def _push_reasoning(self, text: str) -> str:
        """Gives reasoning and returns what is left, behind its end or from a call's marker on."""
        text, self._kept = self._kept + text, ""
        found = self._marks.pattern.search(text)
        if found is None:
            held = self._marks.num_held_back(text)
            self._sink.reasoning(text[: len(text) - held])
            self._kept = text[len(text) - held :]
            return ""
        at, mark = found.start(), found[0]
        self._sink.reasoning(text[:at])
        if mark in self._call_tokens and mark not in self._ends:
            assert self._try_call is not None
            self._trial = self._try_call()
            return text[at:]
        self.is_reasoning = False
        return text[at + len(mark) if mark == self._ends[0] else at :]

    def _try(self, text: str) -> str:
        """Reads what may be a call, and returns what is left once that is decided."""
        assert self._trial is not None
        stage, sink = self._trial
        self._kept += text
        stage.push(text)
        if not (deltas := sink.take()):
            return ""
        whole, self._kept, self._trial = self._kept, "", None
        if isinstance(deltas[0], CallStart):
            self.is_reasoning = False
            return whole
        self._sink.reasoning(whole[0])
        return whole[1:]
