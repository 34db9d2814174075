"""Keeps the requests of an adapter on few decode nodes, so that batches have few adapters and slots
are seldom filled anew.

Every router finds the same order of nodes for an adapter, by rendezvous hash. A request goes to
those in front that have room: two as long as either does, then one more, and so on. A hot adapter
spreads over all nodes that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import xxhash

from router.nodes.node import Node

_NUM_HOMES = 2
_FULL = 0.8
"""The part of a node's KV cache in use from which on the adapter's next node is taken in."""


def in_home_order(nodes: Iterable[Node], digest: str) -> list[Node]:
    """Returns the nodes with those in front that are an adapter's home."""
    key = digest.encode()
    return sorted(nodes, key=lambda node: xxhash.xxh3_64_intdigest(key, node.hash_seed))


def home_nodes(ordered: Sequence[Node], num_kv_tokens: int) -> Sequence[Node]:
    """Returns those that the adapter's next request may go to, of nodes in its order; at least one,
    if there is any."""
    with_room = (node for node in ordered if node.kv_usage_with(num_kv_tokens) < _FULL)
    return list(islice(with_room, _NUM_HOMES)) or ordered
