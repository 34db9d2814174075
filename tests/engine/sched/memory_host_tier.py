"""Transfer processes of a host tier that copy between the fake worker's memory and slots, when the
test lets them.

Each of the two has one half of a block's rows, and reads or writes them only when it answers. So a
block that is given to somebody else while it is stored or loaded breaks some request's KV. A
process says that a load has begun before it has copied anything: whoever does not wait reads
nonsense. What lies in slots and files outlives a process that dies, or does not.
"""

from __future__ import annotations

import random

from kv_transfer.tier import (
    AskMeta,
    FetchMeta,
    ForgetMeta,
    HostTierEvent,
    LoadBegun,
    LoadMeta,
    LoadTicket,
    PutMeta,
    SpillMeta,
    StoreFound,
    StoreMeta,
    Tier,
    TierCommand,
    TierContents,
    TierJob,
)
from kv_transfer.tiers.host_tier import PooledHostTier
from tests.engine.sched.fake_worker import PagedMemory

NUM_PROCESSES = 2
_NUM_PLACES = 2
_GARBAGE = (-8, -8)

Row = tuple[int, int] | None
Store = list[dict[bytes, list[Row]]]
"""Holds what a store has, by process and block, whoever put it there."""


def new_store() -> Store:
    return [{} for _ in range(NUM_PROCESSES)]


class MemoryHostTier:
    """`tier` is what the scheduler asks."""

    def __init__(
        self,
        memory: PagedMemory,
        num_slots: int,
        rng: random.Random,
        num_files: int = 0,
        store: Store | None = None,
    ) -> None:
        self._store = store
        self.release: set[int] = set()
        """Numbers of tickets of loads that failed."""
        self._marks = [[0] * _NUM_PLACES for _ in range(NUM_PROCESSES)]
        """The number of the last load that each process has done all of, by place."""
        self._begun: set[tuple[int, int]] = set()
        self._names: list[dict[int, bytes]] = [{} for _ in range(NUM_PROCESSES)]
        self._files: list[dict[bytes, list[Row]]] = [{} for _ in range(NUM_PROCESSES)]
        self.tier = PooledHostTier(
            num_slots,
            NUM_PROCESSES,
            self._hear,
            num_files,
            lambda ticket: self.release.add(ticket.number),
            num_places=_NUM_PLACES,
            has_store=store is not None,
        )
        self._memory = memory
        self._rng = rng
        self._slots: list[list[Row]] = [[None] * len(memory.slots[0]) for _ in range(num_slots)]
        self._jobs: list[tuple[int, TierCommand]] = []
        for process in range(NUM_PROCESSES):
            self.tier.apply(TierContents(process, 0))

    def _hear(self, process: int, command: TierCommand) -> bool:
        self._jobs.append((process, command))
        return True

    def may_read(self, ticket: LoadTicket) -> bool:
        """Returns whether a step that waits with this ticket may go on."""
        return self.is_right(ticket) or ticket.number in self.release

    def is_right(self, ticket: LoadTicket) -> bool:
        """A place whose load failed is that of another load next, which may be done before the step
        that waited for the first has run."""
        is_done = all(marks[ticket.place] >= ticket.number for marks in self._marks)
        return is_done and ticket.number not in self.release

    def advance(self, *, may_fail: bool = False) -> None:
        """Lets one process do its share of a job; one of a process come in their order."""
        if not self._jobs:
            return
        process = self._rng.choice(self._jobs)[0]
        if may_fail and self._rng.random() < 0.02:
            self._die(process)
            return
        index = next(i for i, (own, _) in enumerate(self._jobs) if own == process)
        _, command = self._jobs[index]
        if isinstance(command, LoadMeta) and (command.job, process) not in self._begun:
            self._begun.add((command.job, process))
            self.tier.apply(LoadBegun(command.job, process))
            return
        del self._jobs[index]
        if isinstance(command, ForgetMeta):
            self._forget(process, command)
            return
        if isinstance(command, AskMeta):
            self._ask(process, command, may_fail=may_fail)
            return
        damaged = [slot for slot in command.slots if may_fail and self._rng.random() < 0.05]
        if isinstance(command, FetchMeta) and command.tier is Tier.STORE:
            has = self._stored(process)
            lacking = (s for n, s in zip(command.names, command.slots, strict=True) if n not in has)
            damaged = sorted({*damaged, *lacking})
        if isinstance(command, SpillMeta | PutMeta):
            # A load may have found them damaged since.
            damaged = sorted(
                {*damaged, *(s for s in command.slots if s not in self._names[process])}
            )
        self._do(process, command, damaged)
        if isinstance(command, LoadMeta) and command.ticket is not None and not damaged:
            self._marks[process][command.ticket.place] = command.ticket.number
        self.tier.apply(HostTierEvent(command.job, process, damaged))

    def begin_all(self) -> None:
        """Lets every process begin with what it was told, and do nothing of it."""
        for process, command in list(self._jobs):
            if isinstance(command, LoadMeta) and (command.job, process) not in self._begun:
                self._begun.add((command.job, process))
                self.tier.apply(LoadBegun(command.job, process))

    def fail_load(self) -> None:
        """Finds the blocks of the loads that are on their way damaged."""
        for process, command in list(self._jobs):
            if isinstance(command, LoadMeta):
                self._jobs.remove((process, command))
                self._do(process, command, command.slots)
                self.tier.apply(HostTierEvent(command.job, process, command.slots))

    def finish(self) -> None:
        while self._jobs:
            self.advance()

    def _do(self, process: int, command: TierJob, damaged: list[int]) -> None:
        names, files = self._names[process], self._files[process]
        match command:
            case StoreMeta(blocks=blocks, slots=slots) | LoadMeta(blocks=blocks, slots=slots):
                for block, slot in zip(blocks, slots, strict=True):
                    self._copy(process, command, block, slot, slot in damaged)
            case SpillMeta(slots=slots):
                for slot in set(slots) - set(damaged):
                    files[names[slot]] = list(self._slots[slot])
            case PutMeta(slots=slots):
                for slot in set(slots) - set(damaged):
                    self._stored(process)[names[slot]] = list(self._slots[slot])
            case FetchMeta(names=fetched, slots=slots, tier=tier):
                source = files if tier is Tier.DISK else self._stored(process)
                for name, slot in zip(fetched, slots, strict=True):
                    for offset in self._rows(process):
                        row = source[name][offset] if slot not in damaged else _GARBAGE
                        self._slots[slot][offset] = row
        if isinstance(command, StoreMeta | FetchMeta):
            names.update(zip(command.slots, command.names, strict=True))
        if not isinstance(command, SpillMeta | PutMeta):
            for slot in damaged:
                names.pop(slot, None)

    def _stored(self, process: int) -> dict[bytes, list[Row]]:
        assert self._store is not None
        return self._store[process]

    def _ask(self, process: int, command: AskMeta, *, may_fail: bool) -> None:
        """Answers; now and then the store has evicted a block, of one process or of both."""
        has = self._stored(process)
        if may_fail and has and self._rng.random() < 0.2:
            has.pop(self._rng.choice(list(has)))
        found = [i for i, name in enumerate(command.names) if name in has]
        if command.is_chain:
            found = [i for count, i in enumerate(found) if i == count]
        self.tier.apply(StoreFound(command.job, process, found))

    def _forget(self, process: int, command: ForgetMeta) -> None:
        files = self._files[process]
        if command.names is None:
            self._names[process].clear()
        for name in list(files) if command.names is None else command.names:
            files.pop(name, None)

    def _rows(self, process: int) -> range:
        return range(process, len(self._slots[0]), NUM_PROCESSES)

    def _copy(
        self, process: int, command: StoreMeta | LoadMeta, block: int, slot: int, is_damaged: bool
    ) -> None:
        rows, kept = self._memory.slots[block], self._slots[slot]
        for offset in self._rows(process):
            if isinstance(command, StoreMeta):
                kept[offset] = _GARBAGE if is_damaged else rows[offset]
            else:
                rows[offset] = _GARBAGE if is_damaged else kept[offset]

    def _die(self, process: int) -> None:
        """Nobody answers what it was told, and what it was about to write is lost: its slots, too,
        in every second case."""
        told = [command for own, command in self._jobs if own == process]
        self._jobs = [(own, command) for own, command in self._jobs if own != process]
        names = self._names[process]
        for command in told:
            if isinstance(command, ForgetMeta):
                self._forget(process, command)
            elif isinstance(command, StoreMeta | FetchMeta):
                for slot in command.slots:
                    names.pop(slot, None)
        if self._rng.random() < 0.5:
            names.clear()
        for slot, kept in enumerate(self._slots):
            if slot not in names:
                for offset in self._rows(process):
                    kept[offset] = _GARBAGE
        self.tier.process_is_gone(process)
        self.tier.apply(TierContents(process, 1, dict(names), list(self._files[process])))
