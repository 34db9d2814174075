"""Keeps the requests of an adapter on few decode nodes, so that batches have few adapters and slots
are seldom filled anew.

Every router finds the same order of nodes for an adapter, by rendezvous hash. A request goes to
those in front that have room: two as long as either does, then one more, and so on. A hot adapter
spreads over all nodes that have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.nodes.node import Node

_NUM_HOMES = 2
_FULL = 0.8
"""The part of a node's KV cache in use from which on the adapter's next node is taken in."""


def home_nodes(nodes: Sequence[Node], digest: str, num_kv_tokens: int) -> list[Node]:
    """Returns those of `nodes` that the adapter's next request may go to; at least one, if there
    is any."""
    key = digest.encode()
    order = sorted(nodes, key=lambda node: xxhash.xxh3_64_intdigest(key, node.hash_seed))
    with_room = [node for node in order if node.kv_usage_with(num_kv_tokens) < _FULL]
    return with_room[:_NUM_HOMES] or order
