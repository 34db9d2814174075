"""Hashes by rendezvous: every router finds the same home for a session, without shared state.

Each (session, node) pair has a pseudo-random weight, and a session's home is the node of the
greatest one. A node that leaves moves only its own sessions; a node that joins takes an equal part
from all others (Thaler and Ravishankar, 1998).

With very many nodes only a window of them is weighed: those that follow the session on a ring of
all nodes. A node that leaves then lets another into each of its windows, so as many sessions
again move; and homes are spread a little less evenly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat
from typing import Generic, Protocol, TypeVar

import xxhash

_MAX_KNOWN_SESSIONS = 16384
_WINDOW = 256
_RING_SEED = 1


class Hashable(Protocol):
    """Is anything that can be a home."""

    @property
    def hash_seed(self) -> int:
        """Returns 64 bits that stand for the node."""


Place = TypeVar("Place", bound=Hashable)


def node_hash_seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


class Rendezvous(Generic[Place]):
    """Finds homes among nodes that stay the same. A session is remembered for its later turns."""

    def __init__(self, nodes: Sequence[Place]) -> None:
        """`nodes` is not empty when `home` is asked for; their order does not matter."""
        self._nodes = sorted(nodes, key=lambda node: node.hash_seed)
        self._seeds = [node.hash_seed for node in self._nodes]
        self._known: OrderedDict[bytes, Place] = OrderedDict()

    def home(self, session_key: bytes) -> Place:
        home = self._known.get(session_key)
        if home is None:
            home = self._choose(session_key)
            if len(self._known) >= _MAX_KNOWN_SESSIONS:
                self._known.popitem(last=False)
            self._known[session_key] = home
        return home

    def _choose(self, session_key: bytes) -> Place:
        start, seeds = 0, self._seeds
        if len(seeds) > _WINDOW:
            start = bisect_left(seeds, xxhash.xxh3_64_intdigest(session_key, _RING_SEED))
            window = seeds[start : start + _WINDOW]
            seeds = window + seeds[: _WINDOW - len(window)]
        weights = list(map(xxhash.xxh3_64_intdigest, repeat(session_key), seeds))
        return self._nodes[(start + weights.index(max(weights))) % len(self._nodes)]
