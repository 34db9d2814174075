"""Brings the reports of simulated nodes to the routers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from planner.simulation.jobs import SimRouter
from planner.simulation.nodes import SimDecodeNode, SimPrefillNode
from planner.simulation.virtual_time import VirtualTime
from router.nodes.address import NodeAddress
from router.nodes.report import NodeReport

_CHANGE_DELAY_S = 0.02

SimNode = SimPrefillNode | SimDecodeNode


@dataclass(slots=True, kw_only=True)
class Reporting:
    """Reports each `every_s`, and 20 ms after a change where `on_change`. `coming` are the times of
    requests that have not come yet. Routers look at reports when they place a request: unless
    `always`, only those before the next request are sent."""

    timeline: VirtualTime
    every_s: float
    on_change: bool
    always: bool
    coming: deque[float]
    nodes: Callable[[], Iterable[SimNode]] = tuple
    routers: Sequence[SimRouter] = ()

    def begin(self) -> None:
        """Reports from now on."""
        self.now()
        next_at = self._next_at()
        if next_at is not None:
            self.timeline.at(next_at, self.begin)

    def now(self) -> None:
        """Brings the reports of all nodes to all routers."""
        for node in self.nodes():
            self.tell(node.address, node.report())

    def changed(self, node: SimNode) -> None:
        """Is called when something changed that a node reports."""
        if self.on_change:
            report = node.report()
            tell_at = self.timeline.now + _CHANGE_DELAY_S
            self.timeline.at(tell_at, lambda: self.tell(node.address, report))

    def _next_at(self) -> float | None:
        """Returns when all nodes report again; None: nothing asks any more. Rare requests and long
        answers would be simulated for ever."""
        now, every_s = self.timeline.now, self.every_s
        if any(len(router.gate.line) for router in self.routers):
            return now + every_s
        if not self.coming:
            return None
        if self.always:
            return now + every_s
        return now + every_s * max(1, math.ceil((self.coming[0] - now) / every_s) - 1)

    def tell(self, address: NodeAddress, report: NodeReport) -> None:
        """Brings one report to all routers."""
        for router in self.routers:
            router.registry.take_report(address, report)
