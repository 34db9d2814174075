"""Learns from decode nodes that another router ends answers.

The other router asks all decode nodes, and their reports name the call. It counts once reports of
more than half of them do: one node that lies ends nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from router.nodes.address import NodeAddress, NodeRole
from router.nodes.registry import NodeRegistry

_MAX_CALLS = 4096
"""Calls that are remembered, the last ones: nodes tell each once to a connection."""

CallPart = tuple[int, int]
"""The call's number, and which part of its names."""


@dataclass(slots=True)
class ToldAborts:
    """Counts the nodes that tell of each call."""

    registry: NodeRegistry
    _tellers: OrderedDict[CallPart, set[NodeAddress]] = field(default_factory=OrderedDict)
    _followed: OrderedDict[CallPart, None] = field(default_factory=OrderedDict)

    def is_to_follow(self, teller: NodeAddress, call: CallPart) -> bool:
        """Returns True once for each call: when `teller` is the last of enough nodes."""
        if call in self._followed:
            return False
        tellers = self._tellers.setdefault(call, set())
        tellers.add(teller)
        reporting = {node.listed for node in self.registry.nodes(NodeRole.DECODE) if node.connected}
        if 2 * len(tellers & reporting) <= len(reporting):
            while len(self._tellers) > _MAX_CALLS:
                self._tellers.popitem(last=False)
            return False
        del self._tellers[call]
        self._followed[call] = None
        while len(self._followed) > _MAX_CALLS:
            self._followed.popitem(last=False)
        return True
