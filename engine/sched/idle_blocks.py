"""Takes from requests of the idle class what any other request lacks: a row, or blocks.

    1. rows      the newest yields, as it would for a row that decodes
    2. arrivals  KV that is here and has no row yet is given up, the newest first

Nothing yields where all of it would not be enough. What a step may still write comes free when that
step ends; no more yields than is lacking then.
Rows that a step which is being put together has begun with stay, and so does KV in motion.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.contracts.request import Request
from engine.kv_cache.group_manager import BlockTables
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.rows.row import Row, RowPhase
from engine.sched.rows.running import RunningRows
from engine.sched.step_fence import StepFence


class IdleBlocks:
    """Sees what they hold. `headroom`: blocks that stay free for the rows that decode, but some."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        fence: StepFence,
        running: RunningRows,
        arrivals: Arrivals,
        headroom: Callable[[int], int],
    ) -> None:
        self._kv_cache = kv_cache
        self._fence = fence
        self._running = running
        self._arrivals = arrivals
        self._headroom = headroom

    def may_have_row(self, request: Request) -> bool:
        """Returns whether `take_row` would free one, or one is free."""
        if self._running.table.num_free > 0:
            return True
        return not request.is_idle_class and bool(self._able())

    def take_row(self) -> None:
        """Preempts a row if none is free, and one may be."""
        if self._running.table.num_free == 0:
            self._preempt_newest()

    def may_have_blocks(self, request: Request) -> bool:
        """Returns whether anything is left to take for the request."""
        if request.is_idle_class:
            return False
        return bool(self._able() or self._arrivals.reclaimable(is_idle_class=True))

    def has_blocks(self, request: Request, num_tokens: int, cached: BlockTables) -> bool:
        """Returns whether blocks are free now for a request that finds `cached`."""
        can_allocate = self._kv_cache.can_allocate
        if can_allocate(num_tokens, cached, self._headroom(0)):
            return True
        if request.is_idle_class:
            return False
        least = self._headroom(self._running.calendar.num_idle) - self._num_held()
        if not can_allocate(num_tokens, cached, least - self._fence.num_blocks):
            return False
        while not can_allocate(num_tokens, cached, self._headroom(0)):
            if can_allocate(num_tokens, cached, self._headroom(0) - self._fence.num_blocks):
                return False
            if not (self._preempt_newest() or self._arrivals.reclaim(is_idle_class=True)):
                return False
        return True

    def _num_held(self) -> int:
        """Returns how many blocks could be taken at most: some may have other users, too."""
        names = [row.request_id for row in self._able()]
        names += [one.request.request_id for one in self._arrivals.reclaimable(is_idle_class=True)]
        return sum(len(ids) for name in names for ids in self._kv_cache.get_block_ids(name))

    def _preempt_newest(self) -> bool:
        """Preempts a row. Returns False if none may be."""
        able = self._able()
        if able:
            self._running.preempt(max(able, key=_key))
        return bool(able)

    def _able(self) -> list[Row]:
        """Returns the rows that may be preempted. Beams of a search go together."""
        idle = [row for row in self._running.table.live() if row.is_idle]
        begun = {row for row in idle if self._running.builder.has_begun(row)}
        keeps_beams = any(row.is_seated for row in begun)
        return [
            row
            for row in idle
            if row not in begun
            and row.phase is not RowPhase.DRAINING
            and not (row.is_exported or (row.is_seated and keeps_beams))
        ]


def _key(row: Row) -> tuple[int, float, int]:
    return row.key
