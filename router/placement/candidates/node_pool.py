"""Keeps the nodes that may be chosen at hand: a decision does not look at every node.

1. fresh   grouped by what they serve: decode nodes by model, prefill nodes by the KV they make
2. stale   the registry's version has moved, or `refresh_s` are over (time alone makes a silent
           node suspect and ends ejections)
3. fresh   again at the next question; a group whose nodes are the same is the same object, and
           keeps what it remembers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.partners import Weights, by_weights, group_of
from router.nodes.registry import NodeRegistry
from router.nodes.session import Rendezvous
from router.placement.candidates.adapter_homes import in_home_order


@dataclass(eq=False)
class NodeGroup:
    """Holds nodes of one tier that can stand in for each other. `members` is the same as a set.
    What else it has is made when something asks: a tier that rolls changes it with each node."""

    nodes: tuple[Node, ...] = ()

    @cached_property
    def members(self) -> frozenset[Node]:
        return frozenset(self.nodes)

    @cached_property
    def rendezvous(self) -> Rendezvous[Node]:
        return Rendezvous(self.nodes)


_Key = TypeVar("_Key")


@dataclass(slots=True, kw_only=True)
class NodePool:
    registry: NodeRegistry
    refresh_s: float = 0.1
    _decodes: dict[str, NodeGroup] = field(default_factory=dict)
    _prefills: dict[Weights, NodeGroup] = field(default_factory=dict)
    _adapted: dict[tuple[NodeGroup, str], NodeGroup] = field(default_factory=dict)
    """Those of a group that have an adapter, by its digest, its homes first."""
    _version: int = -1
    _refreshed_at: float = 0.0

    def decodes(self, model: str, digest: str = "") -> NodeGroup:
        """Returns those that serve `model`, or all for "". Where some have a prefill node to work
        with, only those. `digest`: of an adapter that they must have."""
        self._refresh()
        return self._with_adapter(self._decodes.get(model, _NOBODY), digest)

    def suspect_decodes(self, model: str, digest: str, tried: Collection[Node]) -> list[Node]:
        """Returns those that were not tried, when all others were: ready nodes hide those that are
        only in doubt."""
        nodes = by_model(self.registry.nodes(NodeRole.DECODE)).get(model, [])
        left = [node for node in nodes if node not in tried]
        if digest:
            left = in_home_order((node for node in left if node.has_weights(digest)), digest)
        return self.registry.usable_of(left)

    def partners(self, decode: Node, digest: str = "") -> NodeGroup:
        """Returns the prefill nodes whose KV `decode` can use, those of its model if there are.
        `digest`: of an adapter that they must have."""
        self._refresh()
        return self._with_adapter(group_of(decode, self._prefills, _NOBODY), digest)

    def _with_adapter(self, group: NodeGroup, digest: str) -> NodeGroup:
        if not digest:
            return group
        key = group, digest
        if key not in self._adapted:
            nodes = (node for node in group.nodes if node.has_weights(digest))
            self._adapted[key] = NodeGroup(tuple(in_home_order(nodes, digest)))
        return self._adapted[key]

    def _refresh(self) -> None:
        registry = self.registry
        now = registry.clock()
        if registry.version == self._version and now - self._refreshed_at < self.refresh_s:
            return
        if registry.version != self._version:
            self._adapted.clear()
        self._version, self._refreshed_at = registry.version, now
        states = registry.sorted_out(registry.all_nodes())
        prefills = _usable(by_weights(registry.nodes(NodeRole.PREFILL)), *states)
        fingerprints = {fingerprint for fingerprint, _ in prefills}
        decodes_by_model = by_model(registry.nodes(NodeRole.DECODE))
        decodes = {
            model: with_partner(nodes, fingerprints)
            for model, nodes in _usable(decodes_by_model, *states).items()
        }
        self._prefills = _regroup(self._prefills, prefills)
        self._decodes = _regroup(self._decodes, decodes)


def _usable(
    groups: dict[_Key, list[Node]], ready: Collection[Node], suspects: Collection[Node]
) -> dict[_Key, list[Node]]:
    """Returns the usable nodes of each group that has any, as `NodeRegistry.usable_of` does."""
    usable = {
        name: [node for node in nodes if node in ready]
        or [node for node in nodes if node in suspects]
        for name, nodes in groups.items()
    }
    return {name: nodes for name, nodes in usable.items() if nodes}


def by_model(decodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Groups nodes by each name of their model, with all of them under ""."""
    groups: defaultdict[str, list[Node]] = defaultdict(list)
    for node in decodes:
        groups[""].append(node)
        for name in node.report.model_names if node.report else ():
            groups[name].append(node)
    return groups


def with_partner(decodes: list[Node], prefills: Collection[str]) -> list[Node]:
    """Returns decode nodes whose fingerprint is in `prefills`; all, when none has such a
    partner."""
    return [node for node in decodes if node.fingerprint in prefills] or decodes


def _regroup(before: dict[_Key, NodeGroup], now: dict[_Key, list[Node]]) -> dict[_Key, NodeGroup]:
    groups = {}
    for name, nodes in now.items():
        old = before.get(name)
        same = old is not None and list(old.nodes) == nodes
        groups[name] = old if old is not None and same else NodeGroup(tuple(nodes))
    return groups


_NOBODY = NodeGroup()
