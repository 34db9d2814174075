"""The part that all formats of calls share: content up to a marker, and what a failed call is.

        content ── begin of a call ──▶ header ── function known, arguments begin ──▶ arguments
           ▲                             │                                              │
           └──── no call: content ◀──────┘                   end, or broken off ────────┤
           ▲                                                                            │
           └────────────────────────────────────────────────────────────────────────────┘

Until a header is understood and names a function that the request offers, nothing of it is given;
if it is not, all of it is content, markers spelled out. What is behind that point is looked at for
calls again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence

from decode_node.parsers.stages.delta_sink import DeltaSink
from decode_node.parsers.stages.step_stage import StepStage
from decode_node.parsers.text.marked_text import has_token
from decode_node.parsers.text.text_input import MarkerSet, Steps, marker_set
from decode_node.protocol.chat.tools import Tool

MAX_NAME = 256
"""Characters in which a header's name has to end."""


class CallStage(StepStage):
    """Parses content and calls. A format says what begins a call, and how one is read.

    Args:
        begins: Markers that begin a call, or a section of calls.
        ends: Markers that end one. They say nothing that the arguments have not said: behind a
            call they are dropped, anywhere else they are content.
    """

    def __init__(
        self, sink: DeltaSink, tools: Sequence[Tool], begins: Sequence[str], ends: Sequence[str]
    ) -> None:
        super().__init__(sink)
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._begins = frozenset(begins)
        self._markers = marker_set(*begins, *ends)
        self._frames: frozenset[str] = frozenset()
        self._awaits_end = False

    def drop(self, frames: Collection[str]) -> None:
        """Leaves texts out of content: what stands around it. Comes before anything is read."""
        self._frames = frozenset(frames)
        self._markers = marker_set(*self._markers.markers, *frames)

    @property
    def begin_tokens(self) -> frozenset[str]:
        """Returns the begin markers that are tokens, or have one in them."""
        return frozenset(marker for marker in self._begins if has_token(marker))

    def run(self) -> Steps[None]:
        yield from self.begin()
        while marker := (yield from self.source.until(self._markers, self.sink.content)):
            if marker in self._begins:
                self.source.record(marker)
                yield from self.call(marker)
            elif marker in self._frames:
                continue
            elif not (self._awaits_end or self.sink.is_behind_call):
                self.sink.content(marker)
            else:
                self._awaits_end = False

    def begin(self) -> Steps[None]:
        """Reads what only the beginning of an answer can be."""
        yield from ()

    @abstractmethod
    def call(self, marker: str) -> Steps[None]:
        """Reads what the marker has begun, and leaves the text behind it."""

    def enters(self, marker: str, section: str, begin: str) -> Steps[bool]:
        """Says whether a call begins with the marker, which may be that of a section: then the
        `begin` of its first call is taken."""
        if marker != section:
            return True
        yield from self.source.skip_white_space()
        return (yield from self.source.takes(begin))

    def header(
        self, marker: str, section: str, begin: str, name_ends: MarkerSet
    ) -> Steps[tuple[str, str]]:
        """Takes a header up to the end of its name. Returns the name and what ended it; nothing
        where no call begins."""
        if not (yield from self.enters(marker, section, begin)):
            return "", ""
        name, end = yield from self.source.read(name_ends, MAX_NAME)
        return name.strip(), end

    def accept(self, name: str) -> None:
        """Begins a call for certain."""
        self.source.forget()
        self._awaits_end = True
        self.sink.call_start(name)

    def reject(self) -> None:
        """Gives all that was taken since the marker as content."""
        self.sink.content(self.source.forget())


class FramedContent(CallStage):
    """Gives content without what stands around it: no call is possible."""

    def __init__(self, sink: DeltaSink, frames: Collection[str]) -> None:
        super().__init__(sink, (), (), ())
        self.drop(frames)

    def call(self, marker: str) -> Steps[None]:
        """Is never reached: no marker begins a call."""
        yield from ()
