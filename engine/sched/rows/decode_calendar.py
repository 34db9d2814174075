"""Keeps the step at which each decoding row needs a decision.

A row in the decode set computes up to q tokens in every step, so the first step in which it could
run out of blocks, or out of length, is known when it joins. The calendar notes that one step for
each row: a step costs the scheduler as much as rows have something to decide, not as many as run.

    reserved_base + q * s   tokens of the row that have KV at most, once step s is done
    ahead                   tokens behind those for whose drafts a drafter writes KV of its own
    capacity                tokens that its blocks hold in every group
    event_step              the first step s with reserved_base + q * s + ahead > capacity, or the
                            first behind which the row may have max_len tokens, if that is earlier

A result with fewer than q tokens lowers `reserved_base`, and nothing else: the event may then come
too early, never too late, and the row is planned anew when it is due. With q = 1 there are no such
results.
"""

from __future__ import annotations

from engine.contracts.steps.step_launches import StepParts
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.rows.row import Row, RowPhase


class DecodeCalendar:
    """The decode set as the workers will have it, and the rows to look at before each step."""

    def __init__(self, kv_cache: KVCacheManager, query_len: int, ahead: int = 0) -> None:
        self._kv_cache = kv_cache
        self.ahead = ahead
        self.query_len = query_len
        """Tokens that a row computes in one step at most: q."""
        self._events: dict[int, list[Row]] = {}
        self.rows: set[Row] = set()
        """The decode set."""
        self.idle_rows: set[Row] = set()
        """Those of it that are of the idle class."""

    @property
    def size(self) -> int:
        """Returns the number of rows in the decode set."""
        return len(self.rows)

    @property
    def num_idle(self) -> int:
        return len(self.idle_rows)

    def parts(self) -> StepParts:
        """Returns what decodes in a step, by the tokens that are confirmed."""
        longest = max((len(row.tokens) for row in self.rows), default=0)
        return StepParts(self.size, query_len=self.query_len, longest_decode=longest)

    @property
    def num_tokens(self) -> int:
        """Returns the most tokens that the decode set computes in one step."""
        return len(self.rows) * self.query_len

    def join(self, row: Row, step_id: int) -> None:
        """Lets `row` take part from step `step_id` on; its blocks have room for that step."""
        row.phase = RowPhase.DECODE
        row.reserved_base = row.num_reserved - self.query_len * (step_id - 1)
        self.rows.add(row)
        if row.is_idle:
            self.idle_rows.add(row)
        self.plan(row, step_id)

    def leave(self, row: Row, last_step_id: int) -> None:
        """Takes the row out after `last_step_id`, the last step that was scheduled."""
        row.num_reserved = row.reserved_base + self.query_len * last_step_id
        self.rows.remove(row)
        self.idle_rows.discard(row)

    def plan(self, row: Row, step_id: int) -> None:
        """Notes the next event, after what is decided for `step_id`."""
        last = row.max_len - 1  # the last token's KV is never written, but that of drafts
        capacity = self._kv_cache.capacity(row.blocks)
        if capacity < last + self.query_len - 1:
            event_step = (capacity - self.ahead - row.reserved_base) // self.query_len + 1
        else:
            event_step = -((row.reserved_base - last) // self.query_len) + 1
            if event_step <= step_id:
                event_step = step_id + 1
        row.event_step = event_step
        self._events.setdefault(event_step, []).append(row)

    def due(self, step_id: int) -> list[Row]:
        """Takes the rows to decide on before `step_id`. Notes of rows that left are dropped."""
        rows = self._events.pop(step_id, ())
        return [row for row in rows if row.phase is RowPhase.DECODE and row.event_step == step_id]
