"""Learns from decode nodes that another router ends answers.

The other router asks all decode nodes, and their reports name the call. It counts once reports of
more than half of them do, with the same names: one node that lies ends nothing, and spares nothing.
A node that dies meanwhile is no longer one of them as soon as that is known. Nor is one that
reports nothing for a while: it is frozen, and the call may have passed it by.

A report says how long ago the call reached its node, which may have been frozen for a part of that
time, or lie. So the call was made no later than by the least of these times, without as many as
there are nodes that have not named it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from router.nodes.address import NodeAddress, NodeRole
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import AbortCall

_MAX_CALLS = 4096
"""Calls that are remembered, the last ones: nodes tell each once to a connection."""
_OPEN_S = 5.0
"""A call that too few nodes have named by then is none."""
_SILENT_PART = 1 / 3
"""Nodes that report nothing for this part of the time after which they are stale do not count."""

_MAX_OPEN_OF_ONE = 64
"""Calls of one node that others have not named yet: as many as a node keeps."""

CallPart = tuple[int, int, int]
"""The call's number, which part of its names, and a hash of what it ends."""


@dataclass(slots=True)
class _Open:
    """Is a call that too few nodes have named yet. By the registry's clock `since` is the time of
    the first report, and `called_at` when the call was made, as each node has said it first."""

    call: AbortCall
    since: float
    called_at: dict[NodeAddress, float] = field(default_factory=dict)


@dataclass(slots=True)
class ToldAborts:
    """Counts the nodes that tell of each call."""

    registry: NodeRegistry
    _open: OrderedDict[CallPart, _Open] = field(default_factory=OrderedDict)
    _followed: OrderedDict[CallPart, None] = field(default_factory=OrderedDict)
    _own: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def made(self, call: int) -> None:
        """Remembers a call of this router itself, of which reports tell it nothing new."""
        self._own[call] = None
        while len(self._own) > _MAX_CALLS:
            self._own.popitem(last=False)

    def learn(
        self, teller: NodeAddress, calls: Iterable[AbortCall]
    ) -> Iterator[tuple[AbortCall, float]]:
        """Takes what a report tells, which is nothing most of the time. Yields each call once, and
        when it was made: when enough nodes have named it."""
        now = self.registry.clock()
        for call in calls:
            part = call.call, call.part, hash((call.all, *call.names))
            is_known = call.call in self._own or part in self._followed
            if not is_known and call.age_s <= _OPEN_S:
                self._note(teller, part, call, now)
        if not self._open:
            return
        connected = [node for node in self.registry.nodes(NodeRole.DECODE) if node.connected]
        patience_s = _SILENT_PART * self.registry.patience.stale_after_s
        for part, known in list(self._open.items()):
            silent_at = now - patience_s
            reporting = {
                node.listed for node in connected if max(node.reported_at, known.since) > silent_at
            }
            times = sorted(at for told_by, at in known.called_at.items() if told_by in reporting)
            num_others = len(reporting) - len(times)
            is_enough = num_others < len(times)
            is_over = now - known.since > _OPEN_S + patience_s or len(self._open) > _MAX_CALLS
            if is_enough or is_over:
                del self._open[part]
            if is_enough:
                self._followed[part] = None
                yield known.call, times[num_others]
        while len(self._followed) > _MAX_CALLS:
            self._followed.popitem(last=False)

    def _note(self, teller: NodeAddress, part: CallPart, call: AbortCall, now: float) -> None:
        known = self._open.get(part)
        if known is None:
            if sum(teller in one.called_at for one in self._open.values()) >= _MAX_OPEN_OF_ONE:
                return
            known = self._open[part] = _Open(call, now)
        known.called_at.setdefault(teller, now - max(call.age_s, 0.0))
