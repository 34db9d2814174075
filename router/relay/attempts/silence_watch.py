"""Tells a node that is slow from one that hangs.

    before the answer   a prompt may wait for minutes, and its node reports its load meanwhile:
                        hung when it has said nothing for `stall_s` and its reports have stopped
                        for half of that. Another node can begin the answer, so this may be a
                        mistake
    in a journaled one  the node gives a sign of life at least every second: hung when it has given
                        none for `stall_s`, whatever its reports say; after half of that when
                        its reports have stopped too, which come on a way of their own
    in another answer   hung when the node counts as down: there is nothing to go on
    in each             stuck when it has not begun, or nothing new has come, for `progress_s`,
                        whatever signs of life there are: they say that a process lives, not that it
                        works. A long prompt takes minutes, once more when it was preempted
                        Endless when it has lasted for `answer_s`, however it trickles

Only a node that we wait for can be found hung, not one whose client reads slowly. Time in which
this process itself stood still does not count, neither for answers nor for reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.relay.attempts.event_loop_stalls import EventLoopStalls
from router.relay.attempts.exchange import Exchange

_CHECK_S = 0.25
_PIECE = 256


@dataclass(slots=True, kw_only=True)
class SilenceWatch:
    """Goes by the registry's clock."""

    registry: NodeRegistry
    stall_s: float = 5.0
    progress_s: float = 600.0
    answer_s: float = 21_600.0
    exchanges: set[Exchange] = field(default_factory=set)
    """Those that are open."""
    _stalls: EventLoopStalls = field(default_factory=lambda: EventLoopStalls(_CHECK_S))

    async def run(self) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            next_at = loop.time() + _CHECK_S
            for _ in self.check():
                await asyncio.sleep(0)
            await asyncio.sleep(next_at - loop.time())

    def check(self) -> Iterator[None]:
        """Is called every `_CHECK_S`: later is a standstill. Yields after some of many exchanges:
        others may use the event loop."""
        now = self.registry.clock()
        self._stalls.record(now)
        soon_s = min(self.stall_s / 2, self.registry.patience.down_after_s)
        for number, exchange in enumerate(tuple(self.exchanges), start=1):
            if number % _PIECE == 0:
                yield
            since = exchange.waiting_since
            if since is None:
                continue
            begun_s, stuck_s = now - exchange.asked_at, now - exchange.progress_at
            if now - since < soon_s and stuck_s < self.progress_s and begun_s < self.answer_s:
                continue
            if exchange not in self.exchanges:
                continue
            silent_s = self._stalls.running_time(since, now)
            if self._is_hung(exchange, silent_s, now):
                exchange.give_up(f"it has said nothing for {silent_s:.1f} s")
            elif stuck_s := self._longer(self.progress_s, exchange.progress_at, now):
                exchange.give_up(f"nothing of the answer has come for {stuck_s:.1f} s")
            elif lasting_s := self._longer(self.answer_s, exchange.asked_at, now):
                exchange.give_up(f"the answer has not ended in {lasting_s:.1f} s")

    def _longer(self, limit_s: float, since: float, now: float) -> float:
        """Returns the time since then if it is longer than the limit, else 0."""
        if now - since <= limit_s:
            return 0.0
        running_s = self._stalls.running_time(since, now)
        return running_s if running_s > limit_s else 0.0

    def _is_hung(self, exchange: Exchange, silent_s: float, now: float) -> bool:
        node = exchange.placement.decode
        half_s = self.stall_s / 2
        if exchange.is_journaled:
            both_silent = silent_s > half_s and self._reports_stopped(node, half_s, now)
            return silent_s > self.stall_s or both_silent
        if exchange.status:
            down_s = self.registry.patience.down_after_s
            return silent_s > down_s and self._reports_stopped(node, down_s, now)
        return silent_s > self.stall_s and self._reports_stopped(node, half_s, now)

    def _reports_stopped(self, node: Node, for_s: float, now: float) -> bool:
        """Returns whether they have. Of a node that left the list we know nothing."""
        is_member = self.registry.is_member(node)
        return is_member and self._stalls.running_time(node.reported_at, now) > for_s
