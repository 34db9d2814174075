"""Sums up how loaded the nodes of one model are, as they report it, for answers that tell it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.partners import Weights, by_weights, key_of
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeReport


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Is what a gateway in front of routers balances by: all nodes behind a router are one to it.

    Attributes:
        kv_usage: Share of the decode nodes' KV blocks that are in use, 0 to 1.
        num_waiting: Requests that wait at nodes, and in this router's line.
    """

    kv_usage: float
    num_waiting: int


@dataclass(slots=True)
class _Sum:
    """Is what the nodes of a model report. `partners`: the groups of prefill nodes that work for
    its decode nodes."""

    num_blocks: int = 0
    num_free: int = 0
    num_waiting: int = 0
    partners: set[Weights] = field(default_factory=set)

    def add_decode(self, report: NodeReport) -> None:
        self.num_blocks += report.num_total_blocks
        self.num_free += report.num_free_blocks
        self.num_waiting += report.num_waiting_requests


@dataclass(slots=True)
class ClusterLoads:
    """Sums all models up once in `refresh_s`, in which few nodes report anew: answers ask far more
    often, and a look at a thousand nodes takes as long as a fifth of all else of a request."""

    registry: NodeRegistry
    refresh_s: float = 0.1
    _sums: dict[str, ClusterLoad] = field(default_factory=dict)
    _since: float = -math.inf

    def of(self, model: str, num_in_line: int) -> ClusterLoad:
        """Returns the load of the nodes that can be used for `model`; "": of all."""
        now = self.registry.clock()
        if now - self._since >= self.refresh_s:
            self._sums, self._since = self._of_all(), now
        found = self._sums.get(model, _NONE)
        return ClusterLoad(found.kv_usage, found.num_waiting + num_in_line)

    def _of_all(self) -> dict[str, ClusterLoad]:
        """Returns the load by each name of each model."""
        prefills = self._reporting(NodeRole.PREFILL)
        waiting = {
            group: sum(node.report.num_waiting_requests for node in nodes if node.report)
            for group, nodes in by_weights(prefills).items()
        }
        sums: defaultdict[str, _Sum] = defaultdict(_Sum)
        for node in self._reporting(NodeRole.DECODE):
            if node.report is not None:
                for name in {"", *node.names}:
                    sums[name].add_decode(node.report)
                    sums[name].partners.add(key_of(node, waiting))
        served = {"", *sums}
        for node in prefills:
            if node.report is not None:
                for name in {*node.names} - served:
                    sums[name].num_waiting += node.report.num_waiting_requests
        sums[""].partners = {group for group in waiting if not group[1]}
        return {
            name: ClusterLoad(
                kv_usage=1 - one.num_free / one.num_blocks if one.num_blocks else 0.0,
                num_waiting=one.num_waiting
                + sum(
                    waiting.get(group, 0)
                    for group in one.partners
                    if not group[1] or (group[0], "") not in one.partners
                ),
            )
            for name, one in sums.items()
        }

    def _reporting(self, role: NodeRole) -> list[Node]:
        return [node for node in self.registry.usable(role) if node.report is not None]


_NONE = ClusterLoad(kv_usage=0.0, num_waiting=0)
