"""Picks the few prefill nodes that a decision looks at.

own        the session's last node and its home by rendezvous hash, which every router finds alike
matches    up to two with the longest cached prefix, as far as this router knows
others     they find the idle nodes. Of few nodes the eight with the least to do, which comes first
           of equal ones left to chance; of many the four with the least to do of sixteen, drawn at
           random. The least loaded of very many would be found better by looking at all, and with
           loads that are a moment old all routers would find the same one
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from operator import attrgetter

from router.nodes.node import Node
from router.placement.candidates.node_pool import NodeGroup
from router.placement.prefixes.prefix_index import PrefixMatch

NUM_MATCHES = 2
NUM_OTHERS = 8
NUM_OTHERS_OF_MANY = 4
_DRAWN_OF_MANY = 16
_MANY = 32
_work = attrgetter("predicted_tokens")


def prefill_candidates(
    group: NodeGroup, own: Iterable[Node], match: PrefixMatch, rng: random.Random
) -> list[Node]:
    """Returns them, `own` first and without repetition; none that waits for the outcome of a probe,
    unless there is nothing else."""
    chosen = list(own)
    if len(group.nodes) > NUM_OTHERS:
        chosen += (node for node in match.best(NUM_MATCHES, rng) if node in group.members)
    chosen += others(group.nodes, rng)
    return accepting(dict.fromkeys(chosen))


def others(nodes: Sequence[Node], rng: random.Random) -> list[Node]:
    """Returns some that have little to do."""
    if len(nodes) > _MANY:
        return nsmallest(NUM_OTHERS_OF_MANY, rng.choices(nodes, k=_DRAWN_OF_MANY), key=_work)
    mixed = rng.sample(nodes, len(nodes))
    return nsmallest(NUM_OTHERS, mixed, key=_work) if len(nodes) > NUM_OTHERS else mixed


def accepting(nodes: Sequence[Node] | dict[Node, None]) -> list[Node]:
    """Returns those that may get a request now; all, when none may."""
    return [node for node in nodes if node.health.accepts] or list(nodes)
