"""Keeps what ranks say of themselves beside the results of their steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.contracts.outputs import ExpertStats, GrammarStats
from engine.executor.worker_messages import StepDone

KERNELS_NAMED = 16


class LateKernels:
    """Kernels that were compiled while an engine served.

    Attributes:
        count: All of them.
        names: The last ones, each with all that its compilation depends on.
    """

    def __init__(self) -> None:
        self.count = 0
        self.names: deque[str] = deque(maxlen=KERNELS_NAMED)

    @property
    def all_reported(self) -> tuple[int, list[str]]:
        """Returns what `Executor.late_kernels` does."""
        return self.count, list(self.names)

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self.names.append(name)
            self.count += 1


class RankReports:
    """Holds what came with the latest results. `late_kernels` are those of all ranks that answer,
    the rest is of the first; for its meaning see `Executor`."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.ahead_s: float | None = None
        self.grammar_stats = GrammarStats()
        self.expert_stats: ExpertStats | None = None
        self.late_kernels = LateKernels()

    def take(self, done: StepDone) -> None:
        self.late_kernels.add(done.late_kernels)
        if done.group == 0:
            self.host_s, self.ahead_s = done.host_s, done.ahead_s
            self.grammar_stats = done.grammar_stats or self.grammar_stats
            self.expert_stats = done.expert_stats
