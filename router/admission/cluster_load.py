"""Sums up how loaded the nodes of one model are, as they report it, for answers that tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.nodes.address import NodeRole
from router.nodes.partners import decodes_of, prefills_of
from router.nodes.registry import NodeRegistry


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
class ClusterLoads:
    """Sums each model's up once in `refresh_s`, in which few nodes report anew: answers ask far
    more often, and a look at a thousand nodes takes as long as a fifth of all else of a request."""

    registry: NodeRegistry
    refresh_s: float = 0.1
    _sums: dict[str, ClusterLoad] = field(default_factory=dict)
    _since: float = 0.0

    def of(self, model: str, num_in_line: int) -> ClusterLoad:
        """Returns the load of the nodes that can be used for `model`; "": of all."""
        now = self.registry.clock()
        if now - self._since >= self.refresh_s:
            self._sums, self._since = {}, now
        found = self._sums.get(model)
        if found is None:
            found = self._sums[model] = self._sum(model)
        return ClusterLoad(found.kv_usage, found.num_waiting + num_in_line)

    def _sum(self, model: str) -> ClusterLoad:
        decodes = self.registry.usable(NodeRole.DECODE)
        prefills = prefills_of(model, self.registry.usable(NodeRole.PREFILL), decodes)
        decodes = decodes_of(model, decodes)
        reports = [node.report for node in decodes if node.report is not None]
        num_blocks = sum(report.num_total_blocks for report in reports)
        num_free = sum(report.num_free_blocks for report in reports)
        reports += [node.report for node in prefills if node.report is not None]
        return ClusterLoad(
            kv_usage=1 - num_free / num_blocks if num_blocks else 0.0,
            num_waiting=sum(report.num_waiting_requests for report in reports),
        )
