"""Measures how much of the device steps use: their own FLOPs and bytes by the time that they took.

Everything is counted from what the scheduler knows, when a step goes out and when its result comes:
nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from engine.contracts.outputs import KindRates, WorkStats
from engine.contracts.steps.step_work import ModelCost, StepWork
from engine.sched.rows.row import Row

_DECAY = 0.95
"""Weight that a step leaves to those before it of its kind."""


class WorkMeter:
    """Counts the steps of one engine by the cost of its model."""

    def __init__(self, cost: ModelCost) -> None:
        self._cost = cost
        self._windows = cost.windows
        self._stats = WorkStats()

    def work_of(
        self,
        chunks: Iterable[tuple[Row, int, int]],
        decodes: Iterable[Row],
        step_id: int,
        query_len: int,
    ) -> StepWork:
        """Returns the work of a step. `chunks`: row, tokens with KV once it is done, and how many
        of those it computes."""
        work = StepWork(self._windows)
        for row, end, count in chunks:
            work.add_chunk(end, count, samples=end == row.prefill_len)
        reserved = query_len * step_id
        lengths = [row.reserved_base + reserved for row in decodes]
        if lengths:
            work.add_decodes(lengths, query_len)
        return work

    def add_step(self, work: StepWork, seconds: float) -> None:
        """Counts a step that has ended, and its seconds."""
        flops = self._cost.flops(work)
        read, written = self._cost.bytes_read(work), self._cost.bytes_written(work)
        stats = self._stats
        stats.flops += flops
        stats.read_bytes += read
        stats.write_bytes += written
        stats.kinds.setdefault(work.kind, KindRates()).add(_DECAY, flops, read + written, seconds)

    def stats(self) -> WorkStats:
        return deepcopy(self._stats)
