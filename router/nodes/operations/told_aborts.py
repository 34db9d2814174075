"""Learns from decode nodes that another router ends answers.

The other router asks all decode nodes, and their reports name the call. It counts once reports of
more than half of them do, with the same names: one node that lies ends nothing, and spares nothing.
A node that dies meanwhile is no longer one of them as soon as that is known.
"""

from __future__ import annotations

import time
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

_MAX_OPEN_OF_ONE = 64
"""Calls of one node that others have not named yet: as many as a node keeps."""

CallPart = tuple[int, int, int]
"""The call's number, which part of its names, and a hash of what it ends."""


@dataclass(slots=True)
class _Open:
    """Is a call that too few nodes have named yet. By this router's clock `called_at` is the latest
    time in a report, and `since` that of the first report."""

    call: AbortCall
    called_at: float
    since: float
    tellers: set[NodeAddress] = field(default_factory=set)


@dataclass(slots=True)
class ToldAborts:
    """Counts the nodes that tell of each call."""

    registry: NodeRegistry
    _open: OrderedDict[CallPart, _Open] = field(default_factory=OrderedDict)
    _followed: OrderedDict[CallPart, None] = field(default_factory=OrderedDict)

    def learn(
        self, teller: NodeAddress, calls: Iterable[AbortCall]
    ) -> Iterator[tuple[AbortCall, float]]:
        """Takes what a report tells, which is nothing most of the time. Yields each call once, and
        when it was made: when enough nodes have named it."""
        now = time.monotonic()
        for call in calls:
            part = call.call, call.part, hash((call.all, *call.names))
            if part not in self._followed and call.age_s <= _OPEN_S:
                self._note(teller, part, call, now)
        if not self._open:
            return
        reporting = {node.listed for node in self.registry.nodes(NodeRole.DECODE) if node.connected}
        for part, known in list(self._open.items()):
            is_enough = 2 * len(known.tellers & reporting) > len(reporting)
            if is_enough or now - known.since > _OPEN_S or len(self._open) > _MAX_CALLS:
                del self._open[part]
            if is_enough:
                self._followed[part] = None
                yield known.call, known.called_at
        while len(self._followed) > _MAX_CALLS:
            self._followed.popitem(last=False)

    def _note(self, teller: NodeAddress, part: CallPart, call: AbortCall, now: float) -> None:
        called_at = now - max(call.age_s, 0.0)
        known = self._open.get(part)
        if known is None:
            if sum(teller in one.tellers for one in self._open.values()) >= _MAX_OPEN_OF_ONE:
                return
            known = self._open[part] = _Open(call, called_at, now)
        known.called_at = max(known.called_at, called_at)
        known.tellers.add(teller)
