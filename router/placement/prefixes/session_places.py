"""Remembers where each session's last prompt went, for what the prefix index cannot see.

The index knows whole blocks of some 1000 tokens; the end of a longer conversation and all of a
short one are in no block, and still cached where its last turn was computed.

1. noted     a prompt of the session was sent to a node
2. found     a later turn asks for it
3. forgotten its node is gone, or `max_sessions` others were noted since
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from router.nodes.node import Node

_MAX_SESSIONS = 1 << 16


@dataclass(slots=True)
class SessionPlaces:
    max_sessions: int = _MAX_SESSIONS
    _places: OrderedDict[bytes, Node] = field(default_factory=OrderedDict)
    _keys: dict[Node, set[bytes]] = field(default_factory=dict)
    """The sessions of each node: one that goes takes them without a look at all others."""

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session_key: bytes, members: Collection[Node]) -> Node | None:
        """Returns the session's node if it is one of `members`."""
        node = self._places.get(session_key)
        return node if node in members else None

    def note(self, session_key: bytes, node: Node) -> None:
        self._drop(session_key, self._places.pop(session_key, None))
        self._places[session_key] = node
        self._keys.setdefault(node, set()).add(session_key)
        if len(self._places) > self.max_sessions:
            self._drop(*self._places.popitem(last=False))

    def retain(self, nodes: Collection[Node]) -> None:
        """Forgets the sessions of all nodes but these."""
        for node in [node for node in self._keys if node not in nodes]:
            for key in self._keys.pop(node):
                del self._places[key]

    def _drop(self, session_key: bytes, node: Node | None) -> None:
        """Takes a session from its node."""
        if node is not None:
            self._keys[node].discard(session_key)
            if not self._keys[node]:
                del self._keys[node]
