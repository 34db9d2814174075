"""When a decoding row needs a decision.

A row in the decode set computes one token in every step, so the step in which it runs out of
blocks, or out of length, is known when it joins. The calendar notes that one step for each row:
a step costs the scheduler as much as rows have something to decide, not as many as run.

    decode_base + s     tokens of the row that are scheduled once step s is
    capacity            tokens that its blocks hold
    event_step          the first step s with decode_base + s > capacity,
                        or with decode_base + s = max_len, whichever is earlier
"""

from __future__ import annotations

from engine.sched.row import Row, RowPhase


class DecodeCalendar:
    """The decode set as the workers will have it, and the rows to look at before each step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: dict[int, list[Row]] = {}
        self.size = 0
        """Rows in the decode set."""

    def join(self, row: Row, step_id: int) -> None:
        """`row` computes a token in step `step_id` and all that follow; its blocks have room."""
        row.phase = RowPhase.DECODE
        row.decode_base = row.num_scheduled - (step_id - 1)
        self.size += 1
        self.plan(row)

    def leave(self, row: Row, last_step_id: int) -> None:
        """`last_step_id`: the last step that was scheduled, the row's last one."""
        row.num_scheduled = row.decode_base + last_step_id
        self.size -= 1

    def plan(self, row: Row) -> None:
        """Notes the next event: after joining, and after the row got blocks."""
        capacity = len(row.blocks) * self._block_size
        row.event_step = min(capacity + 1, row.max_len) - row.decode_base
        self._events.setdefault(row.event_step, []).append(row)

    def due(self, step_id: int) -> list[Row]:
        """Takes the rows to decide on before `step_id`. Notes of rows that left are dropped."""
        rows = self._events.pop(step_id, ())
        return [row for row in rows if row.phase is RowPhase.DECODE and row.event_step == step_id]
