"""Tells a node that is slow from one that hangs.

    before the answer   a prompt may wait for minutes, and its node reports its load meanwhile:
                        hung when it has said nothing for `stall_s` and its reports have stopped
                        for half of that. Another node can begin the answer, so this may be a
                        mistake
    in a journaled one  the node gives a sign of life at least every second: hung when it has given
                        none for `stall_s`, whatever its reports say; after half of that when
                        its reports have stopped too, which come on a way of their own
    in another answer   hung when the node counts as down: there is nobody to go on

Only a node that we wait for can be found hung, not one whose client reads slowly. Time in which
this process itself stood still does not count.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.relay.exchange import Exchange

_CHECK_S = 0.25
_LATE_S = 1.0


@dataclass(slots=True, kw_only=True)
class SilenceWatch:
    registry: NodeRegistry
    stall_s: float = 5.0
    exchanges: set[Exchange] = field(default_factory=set)
    """Those that are open."""
    _stood_still_until: float = 0.0

    async def run(self) -> None:
        """Runs until cancelled."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(_CHECK_S)
            now = time.monotonic()
            if now - checked_at > _CHECK_S + _LATE_S:
                self._stood_still_until = now
            checked_at = now
            self.check(now)

    def check(self, now: float) -> None:
        for exchange in tuple(self.exchanges):
            since = exchange.waiting_since
            if since is None:
                continue
            silent_s = now - max(since, self._stood_still_until)
            if self._is_hung(exchange, silent_s):
                exchange.give_up(f"it has said nothing for {silent_s:.1f} s")

    def _is_hung(self, exchange: Exchange, silent_s: float) -> bool:
        node = exchange.placement.decode
        half_s = self.stall_s / 2
        if exchange.is_journaled:
            both_silent = silent_s > half_s and self._reports_stopped(node, half_s)
            return silent_s > self.stall_s or both_silent
        if exchange.status:
            return silent_s > self.registry.patience.down_after_s and self.registry.is_down(node)
        return silent_s > self.stall_s and self._reports_stopped(node, half_s)

    def _reports_stopped(self, node: Node, for_s: float) -> bool:
        """Returns whether they have. Of a node that left the list we know nothing."""
        is_member = node in self.registry.nodes(node.address.role)
        return is_member and self.registry.clock() - node.reported_at > for_s
