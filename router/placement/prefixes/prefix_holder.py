"""Finds who may give a prefill node the part of a prompt's KV that it lacks.

prefill    a node that has a longer prefix
decode     one that gave the conversation's last answer: it has the prompt of that turn, and the
           answer behind it, which routers never see. So it is named for as long a match, too

A few are looked at: an opening that all prompts share is on every node. A wrong guess costs one
short call. A node that an operator has drained gives what it has, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.registry import NodeRegistry
from router.placement.prefixes.prefix_index import PrefixMatch

_MAX_LOOKED_AT = 16
_GIVING = (NodeState.READY, NodeState.DRAINED)


def find_holder(
    own: int, target: Node, matches: Sequence[PrefixMatch], registry: NodeRegistry
) -> Node | None:
    """Returns the best to ask for what `target` lacks, which has `own` blocks of the prompt; None:
    nothing is known."""
    if target.report is None or not target.report.serves_prefixes:
        return None
    best: Node | None = None
    best_rank = (own, False)
    for match in matches:
        for node, length in islice(match.holders(max(1, own)), _MAX_LOOKED_AT):
            rank = (length, node.address.role is NodeRole.DECODE)
            if rank > best_rank and _can_give(node, target, registry):
                best, best_rank = node, rank
    return best


def _can_give(node: Node, target: Node, registry: NodeRegistry) -> bool:
    report = node.report
    return (
        node is not target
        and report is not None
        and report.serves_prefixes
        and node.fingerprint == target.fingerprint
        and node.connected
        and registry.state(node) in _GIVING
    )
