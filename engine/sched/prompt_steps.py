"""Fills steps with prompts: those in rows, and those that wait, in one order.

without an order   rows go on first, oldest first; then requests are admitted, in their order
with one           what needs no computation to speak of enters first. Then rows and requests
                   that wait take turns by `PromptOrder`, as if they stood in one line, until the
                   step is full; a row behind them sits this step out
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.config import SchedulingPolicy
from engine.contracts.request import Request
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.admission import Admission
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.counters import PrefillRate
from engine.sched.prompts.prompt_order import MANY_PROMPTS, Line, PromptOrder, StepRoom
from engine.sched.prompts.prompt_queue import PromptQueue
from engine.sched.request_queue import RequestQueue, SortKey
from engine.sched.rows.row import Row
from engine.sched.rows.running import RunningRows


class PromptSteps:
    """Applies one scheduler's order of prompts, if it has one. `clock` gives seconds."""

    def __init__(
        self,
        order: PromptOrder | None,
        policy: SchedulingPolicy,
        kv_cache: KVCacheManager,
        prefill_rate: PrefillRate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order = order
        self._kv_cache = kv_cache
        self._prefill_rate = prefill_rate
        self._clock = clock
        self._queue = PromptQueue(policy, self._judge) if order is not None else None
        self.waiting: RequestQueue = RequestQueue(policy) if self._queue is None else self._queue
        self.arrivals: Arrivals | None = None
        """Knows whose prompt a prefill node computes."""

    def _judge(self, request: Request) -> None:
        """Sets what is left to compute of a request, and when it is due. One that comes back, or
        whose prompt a peer computes, goes ahead of all others.
        """
        if request.prompt_work is None:
            request.prompt_work = self._work(request)
        if not request.due_at:
            rate = self._prefill_rate.tokens_per_s
            seconds = request.prompt_work / rate if rate else 0.0
            assert self._order is not None
            request.due_at = self._order.due_at(self._clock(), seconds)

    def _work(self, request: Request) -> float:
        arrivals = self.arrivals
        is_pulled = arrivals is not None and arrivals.get(request.request_id) is not None
        if request.num_preemptions or is_pulled:
            return 0.0
        assert self._order is not None
        _, num_cached = self._kv_cache.get_computed_blocks(request, request.num_tokens - 1)
        return self._order.chunks.worth(num_cached, request.num_tokens - num_cached)

    def fill(
        self,
        running: RunningRows,
        admission: Admission,
        tokens: int,
        most_prompts: int = MANY_PROMPTS,
        *,
        may_admit: bool,
    ) -> None:
        """Adds the next step's parts of prompts, of `tokens` together at most. `most_prompts`: see
        `StepRoom.prompts_left`."""
        queue, longest_part = self._queue, admission.longest_part
        num_prompts = running.num_prefills + len(self.waiting)
        if self._order is None or queue is None or not num_prompts:
            room = StepRoom(tokens, longest_part, running.even_chunks)
            room.prompts_left = most_prompts
            running.continue_prefills(running.prefills_in_order(), room)
            if may_admit:
                admission.admit(room)
            return
        now = self._clock()
        room = self._order.room(now, tokens, longest_part, num_prompts, queue.shortest)
        room.prompts_left = most_prompts
        rows = running.prefills_in_order(self._take_turn(running, admission, queue, now))
        if may_admit:
            admission.admit_prepared(room)
        while rows or (may_admit and queue):
            before = queue.first_key if may_admit and queue else None
            left = room.left
            running.continue_prefills(rows, room, before)
            if may_admit:
                admission.admit_waiting(room, rows[0][0] if rows else None)
            if room.left == left:
                break
        running.continue_prefills(rows, room)
        if may_admit:
            admission.admit_early()

    def _take_turn(
        self, running: RunningRows, admission: Admission, queue: PromptQueue, now: float
    ) -> Callable[[Row], SortKey]:
        """Decides which line goes first, and returns the keys of rows in it.

        A request that is due and finds no room keeps what waits behind it from taking any.
        """
        assert self._order is not None
        dues = (row.request.due_at for row in running.prefills())
        first = queue.first_due
        has_no_room = (
            first is not None and first.due_at <= now and admission.without_room == first.request_id
        )
        earliest = min([queue.first_due_at, *dues])
        line = self._order.turn(now, earliest, insists=has_no_room)
        queue.turn_to(line)
        return lambda row: self._row_key(row, queue, line)

    def _row_key(self, row: Row, queue: PromptQueue, line: Line) -> SortKey:
        request = row.request
        assert self._order is not None
        if line is Line.DUE:
            return queue.priority(request), request.due_at, request.arrival_order
        work = self._order.chunks.worth(row.num_reserved, row.remaining_prefill)
        return queue.priority(request), work, request.arrival_order
