"""Rendezvous hashing: every router ranks the nodes for a session alike, without shared state.

Each (session, node) pair has a pseudo-random weight, and a session's home is the node of the
greatest one. A node that leaves moves only its own sessions, each to the second in its ranking;
a node that joins takes an equal part from all others (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import xxhash


class Hashable(Protocol):
    """Anything that has a place in the ranking."""

    @property
    def hash_seed(self) -> int:
        """64 bits that stand for the node."""


Ranked = TypeVar("Ranked", bound=Hashable)


def node_hash_seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def rank_by_rendezvous(session_key: bytes, nodes: Iterable[Ranked]) -> list[Ranked]:
    """Home first, then where the session goes when the ones before it are away."""
    return sorted(
        nodes,
        key=lambda node: xxhash.xxh3_64_intdigest(session_key, seed=node.hash_seed),
        reverse=True,
    )
