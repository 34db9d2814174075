"""One of several ranks, without the others."""

from __future__ import annotations

from engine.parallel.distributed import ParallelGroup


class FakeGroup(ParallelGroup):
    """Rank `rank` of `size`, as far as shares and loading must know it."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(0, 1)
        self.rank, self.size = rank, size
