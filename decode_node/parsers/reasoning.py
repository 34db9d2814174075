"""Splits reasoning from what follows it.

        at the beginning ── white space, begin marker ──▶ open ── end marker ──▶ closed
               └─────────────── anything else ────────────────────────────────────▶

An answer has one stretch of reasoning, at its beginning: open from the start where the prompt ends
with the begin marker, which the model may then write once more. Markers later on are content, and
calls inside of reasoning are reasoning. Without an end marker all of the answer is reasoning.
"""

from __future__ import annotations

from decode_node.parsers.delta_sink import DeltaSink
from decode_node.parsers.marked_text import num_held_back
from decode_node.parsers.stage import Stage


class ReasoningStage:
    """Gives reasoning to the sink and the rest to the next stage.

    Markers are marked text. `ends_before` is a marker that ends reasoning and belongs to the next
    stage already: some models begin to call without an end marker.
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
    ) -> None:
        self._begin = begin
        self._ends = [end, *([ends_before] if ends_before else [])]
        self._sink = sink
        self._follow = follow
        self._blank: list[str] = []
        """White space before anything else."""
        self._kept = ""
        self._is_at_beginning = True
        self.is_reasoning = is_open

    def push(self, text: str) -> None:
        if self._is_at_beginning:
            if not self._kept and text.isspace():
                self._blank.append(text)
                return
            text, self._kept = self._kept + text, ""
            text = self._skip_begin(text)
        if text and self.is_reasoning:
            self._push_reasoning(text)
        elif text:
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
        elif self._begin.startswith(stripped):
            self._kept = text
            return ""
        else:
            text = "".join(self._blank) + text
        self._blank = []
        self._is_at_beginning = False
        return text

    def _push_reasoning(self, text: str) -> None:
        text, self._kept = self._kept + text, ""
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if not found:
            held = max(num_held_back(text, end) for end in self._ends)
            self._sink.reasoning(text[: len(text) - held])
            self._kept = text[len(text) - held :]
            return
        at, end = min(found)
        self.is_reasoning = False
        self._sink.reasoning(text[:at])
        if rest := text[at + len(end) if end == self._ends[0] else at :]:
            self._follow.push(rest)
