"""Remembers where each session's last prompt went, for what the prefix index cannot see.

The index knows whole blocks of some 1000 tokens; the end of a longer conversation and all of a
short one are in no block, and still cached where its last turn was computed.

1. noted     a prompt of the session was sent to a node
2. found     a later turn asks for it
3. forgotten its node is gone, or `max_sessions` others were noted since
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from router.nodes.node import Node

_MAX_SESSIONS = 1 << 16


@dataclass(slots=True)
class SessionPlaces:
    max_sessions: int = _MAX_SESSIONS
    _places: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """Has the numbers of nodes: one that goes is forgotten without a look at its sessions."""
    _nodes: dict[int, Node] = field(default_factory=dict)
    _numbers: dict[Node, int] = field(default_factory=dict)
    _new_numbers: Iterator[int] = field(default_factory=count)

    def find(self, session_key: bytes, members: Collection[Node]) -> Node | None:
        """Returns the session's node if it is one of `members`."""
        node = self._nodes.get(self._places.get(session_key, -1))
        return node if node in members else None

    def note(self, session_key: bytes, node: Node) -> None:
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = next(self._new_numbers)
            self._nodes[number] = node
        self._places[session_key] = number
        self._places.move_to_end(session_key)
        if len(self._places) > self.max_sessions:
            self._places.popitem(last=False)

    def retain(self, nodes: Collection[Node]) -> None:
        """Forgets the sessions of all nodes but these."""
        for node in [node for node in self._numbers if node not in nodes]:
            del self._nodes[self._numbers.pop(node)]
