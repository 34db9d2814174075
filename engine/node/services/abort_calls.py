"""Remembers which answers a router has ended, for other routers, in which some may still wait."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from tandem_pb import node_pb2

EndAnswers = Callable[[Collection[str] | None], int]
"""Ends the answers of these names, or all, and returns how many."""

_KEPT_S = 5.0
_MAX_CALLS = 64
_MAX_PART_BYTES = 1 << 16
"""Names of one part. No answer has a longer name."""
_MAX_PARTS = 4
"""Parts in one report, which has a largest size."""


@dataclass(slots=True)
class AbortCalls:
    """Holds the calls of the last seconds, in parts that fit into reports."""

    _parts: deque[tuple[float, node_pb2.AbortCall]] = field(
        default_factory=lambda: deque(maxlen=_MAX_CALLS)
    )
    _num_noted: int = 0
    _ended: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """How many answers each of the last calls has ended."""

    def end(self, call: int, names: Collection[str] | None, end: EndAnswers) -> int:
        """Ends the answers of these names, or all, by `end`, and notes the call. Returns how many
        those were. A call that is made again, as its connection broke, gets the same answer and
        ends nothing: what has begun since goes on."""
        if call not in self._ended:
            self._note(call, names)
            self._ended[call] = end(names)
            while len(self._ended) > _MAX_CALLS:
                self._ended.popitem(last=False)
        return self._ended[call]

    def _note(self, call: int, names: Collection[str] | None) -> None:
        for number, part in enumerate([()] if names is None else _in_parts(names)):
            told = node_pb2.AbortCall(call=call, part=number, names=part, all=names is None)
            self._parts.append((time.monotonic(), told))
            self._num_noted += 1

    def since(self, num_seen: int) -> tuple[list[node_pb2.AbortCall], int]:
        """Returns what was noted after the first `num_seen`, but not what is old, and how many are
        seen with it. Of many it gives the first."""
        first = self._num_noted - len(self._parts)
        num_seen, now = max(num_seen, first), time.monotonic()
        new = list(self._parts)[num_seen - first :][:_MAX_PARTS]
        told = []
        for at, call in new:
            if now - at <= _KEPT_S:
                call.age_s = now - at
                told.append(call)
        return told, num_seen + len(new)


def _in_parts(names: Collection[str]) -> Iterator[list[str]]:
    part: list[str] = []
    num_bytes = 0
    for name in sorted(names):  # Parts of one call are alike at all nodes.
        size = len(name.encode())
        if size > _MAX_PART_BYTES:
            continue
        if num_bytes + size > _MAX_PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(name)
        num_bytes += size
    yield part
