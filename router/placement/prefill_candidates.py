"""Picks the few prefill nodes that a decision looks at.

home       the session's node by rendezvous hash: every router finds the same
matches    up to two with the longest cached prefix, as far as this router knows
others     they find the idle nodes. Of few nodes eight at random; of many the four with the least
           to do of sixteen, drawn at random. All nodes would find them better, and with loads that
           are a moment old all routers would find the same one
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter

from router.nodes.node import Node
from router.placement.node_pool import NodeGroup
from router.placement.prefix_index import PrefixMatch

NUM_MATCHES = 2
NUM_OTHERS = 8
NUM_OTHERS_OF_MANY = 4
_DRAWN_OF_MANY = 16
_MANY = 32
_LOOK_AT_ALL = NUM_OTHERS
_work = attrgetter("predicted_tokens")


def prefill_candidates(
    group: NodeGroup, home: Node | None, match: PrefixMatch, rng: random.Random
) -> list[Node]:
    """Returns them, home first and without repetition; none that waits for the outcome of a probe,
    unless there is nothing else."""
    chosen: list[Node] = [] if home is None else [home]
    if len(group.nodes) <= _LOOK_AT_ALL:
        chosen += group.nodes
    else:
        chosen += (node for node in match.best(NUM_MATCHES, rng) if node in group.members)
        chosen += others(group.nodes, rng)
    return accepting(dict.fromkeys(chosen))


def others(nodes: Sequence[Node], rng: random.Random) -> list[Node]:
    """Returns some that have little to do."""
    if len(nodes) <= _MANY:
        return rng.sample(nodes, NUM_OTHERS)
    return nsmallest(NUM_OTHERS_OF_MANY, rng.choices(nodes, k=_DRAWN_OF_MANY), key=_work)


def accepting(nodes: Sequence[Node] | dict[Node, None]) -> list[Node]:
    """Returns those that may get a request now; all, when none may."""
    return [node for node in nodes if node.health.accepts] or list(nodes)
