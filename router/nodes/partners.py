"""Says which prefill nodes work for which decode nodes.

Those of the same fingerprint: the same weights and the same KV. Where two models share their
weights under two names, each keeps to the prefill nodes of its own name, if it has any: what one is
asked does not slow the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

from router.nodes.node import Node

_Nodes = TypeVar("_Nodes")
Weights = tuple[str, str]
"""A fingerprint, and the name of a model, or "" for all names."""


def by_weights(prefills: Iterable[Node]) -> dict[Weights, list[Node]]:
    """Groups nodes by fingerprint and name, and by fingerprint alone."""
    groups: defaultdict[Weights, list[Node]] = defaultdict(list)
    for node in prefills:
        fingerprint, model = node.fingerprint, node.model
        groups[fingerprint, ""].append(node)
        if model:
            groups[fingerprint, model].append(node)
    return groups


def partners_of(decode: Node, groups: Mapping[Weights, list[Node]]) -> list[Node]:
    """Returns the nodes whose KV `decode` can use, in a list of `groups`."""
    return group_of(decode, groups, [])


def partners_of_all(
    decodes: Iterable[Node], groups: Mapping[Weights, list[Node]]
) -> dict[Node, None]:
    """Returns the nodes that work for any of `decodes`, in order."""
    of_kinds = {(node.fingerprint, node.model): node for node in decodes}
    return {node: None for one in of_kinds.values() for node in partners_of(one, groups)}


def group_of(decode: Node, groups: Mapping[Weights, _Nodes], others: _Nodes) -> _Nodes:
    """Returns the group that works for `decode`, or `others`."""
    return groups.get(key_of(decode, groups), others)


def key_of(decode: Node, groups: Container[Weights]) -> Weights:
    """Returns which group works for `decode`, if there is one."""
    named = decode.fingerprint, decode.model
    return named if named in groups else (decode.fingerprint, "")


def decodes_of(model: str, decodes: Iterable[Node]) -> list[Node]:
    """Returns those that have reported that they serve `model`; any will do for ""."""
    reporting = (node for node in decodes if node.report is not None)
    return [node for node in reporting if not model or model in node.names]


def prefills_of(model: str, prefills: Iterable[Node], decodes: Iterable[Node]) -> list[Node]:
    """Returns those that work for the decode nodes of `model`, by whatever name they serve; by
    their names where no decode node has said what that is."""
    own = decodes_of(model, decodes)
    if not model or not own:
        return decodes_of(model, prefills)
    groups = by_weights(node for node in prefills if node.report is not None)
    return list(partners_of_all(own, groups))
