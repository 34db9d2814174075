"""Transfer processes of a host tier that copy between the fake worker's memory and slots, when the
test lets them.

Each of the two has one half of a block's rows, and reads or writes them only when it answers. So a
block that is given to somebody else while it is stored or loaded breaks some request's KV.
"""

from __future__ import annotations

import random

from kv_transfer.host_tier import HostTier
from kv_transfer.metadata import HostTierEvent, LoadMeta, StoreMeta
from tests.engine.sched.fake_worker import PagedMemory

NUM_PROCESSES = 2
_GARBAGE = (-8, -8)

Row = tuple[int, int] | None


class MemoryHostTier:
    """`tier` is what the scheduler asks."""

    def __init__(self, memory: PagedMemory, num_slots: int, rng: random.Random) -> None:
        self.tier = HostTier(num_slots, NUM_PROCESSES, self._hear)
        self._memory = memory
        self._rng = rng
        self._slots: list[list[Row]] = [[None] * len(memory.slots[0]) for _ in range(num_slots)]
        self._jobs: list[tuple[int, StoreMeta | LoadMeta]] = []

    def _hear(self, process: int, command: StoreMeta | LoadMeta) -> bool:
        self._jobs.append((process, command))
        return True

    def advance(self, *, may_fail: bool = False) -> None:
        """Lets one process do its share of a job; one of a process come in their order."""
        if not self._jobs:
            return
        process = self._rng.choice(self._jobs)[0]
        if may_fail and self._rng.random() < 0.02:
            self._die(process)
            return
        index = next(i for i, (own, _) in enumerate(self._jobs) if own == process)
        _, command = self._jobs.pop(index)
        damaged = []
        for block, slot in zip(command.blocks, command.slots, strict=True):
            is_damaged = may_fail and self._rng.random() < 0.05
            if is_damaged:
                damaged.append(slot)
            self._copy(process, command, block, slot, is_damaged)
        self.tier.apply(HostTierEvent(command.job, process, damaged))

    def finish(self) -> None:
        while self._jobs:
            self.advance()

    def _copy(
        self, process: int, command: StoreMeta | LoadMeta, block: int, slot: int, is_damaged: bool
    ) -> None:
        rows, kept = self._memory.slots[block], self._slots[slot]
        for offset in range(process, len(rows), NUM_PROCESSES):
            if isinstance(command, StoreMeta):
                kept[offset] = _GARBAGE if is_damaged else rows[offset]
            else:
                rows[offset] = _GARBAGE if is_damaged else kept[offset]

    def _die(self, process: int) -> None:
        """Its memory goes, and nobody answers what it was told."""
        for kept in self._slots:
            for offset in range(process, len(kept), NUM_PROCESSES):
                kept[offset] = _GARBAGE
        self._jobs = [(own, command) for own, command in self._jobs if own != process]
        self.tier.process_is_gone(process)
