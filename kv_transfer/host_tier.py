"""Which blocks lie in host memory, by hash: the half beside the scheduler.

A slot is the same on every rank and in every transfer process.

    free ── store ──▶ STORING ── all processes ──▶ STORED ◀── load: pinned until the job is done
      ▲                  │ one says no                │
      └──────────────────┴──── displaced, damaged ────┘

Stored blocks are displaced in the order of their last use. A lookup uses blocks from the last to
the first: a prefix is of use without its tail, but never the other way round. A transfer process
that dies takes its share of every block along, so then all are forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.metadata import HostTierEvent, LoadMeta, StoreMeta
from kv_transfer.tier import Tier

Send = Callable[[int, StoreMeta | LoadMeta], bool]
"""Tells a transfer process, by number; False: it is down, and will not answer."""


@dataclass(slots=True)
class _Job:
    names: list[bytes]
    slots: list[int]
    is_load: bool
    unanswered: set[int]
    damaged: set[int] = field(default_factory=set)
    is_lost: bool = False


class HostTier:
    """`num_slots` blocks. Calls return at once; `take_finished` says what has become of jobs."""

    def __init__(self, num_slots: int, num_processes: int, send: Send) -> None:
        self._num_processes = num_processes
        self._send = send
        self._free = list(reversed(range(num_slots)))
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        """Slot by hash; displaced from the front."""
        self._storing: set[bytes] = set()
        self._pins: Counter[int] = Counter()
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._finished: dict[int, bool] = {}
        self._totals = Counter[str]()

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def counters(self) -> dict[str, float]:
        names = ("stored", "loaded", "displaced", "damaged", "lost")
        totals = {f"host_tier_{name}_blocks": float(self._totals[name]) for name in names}
        return {**totals, "host_tier_blocks": float(len(self._stored))}

    def __contains__(self, name: bytes) -> bool:
        """Returns whether it is stored, or about to be."""
        return name in self._stored or name in self._storing

    def tier_of(self, name: bytes) -> Tier | None:
        """Returns where the block lies; None: it is not here, or not yet."""
        return Tier.HOST if name in self._stored else None

    def num_found(self, names: Sequence[bytes], start: int) -> int:
        """Returns how many blocks from `names[start]` on are stored without a gap. All of `names`
        count as used."""
        stored = self._stored
        for name in reversed(names):
            if name in stored:
                stored.move_to_end(name)
        count = 0
        for name in names[start:]:
            if name not in stored:
                break
            count += 1
        return count

    def store(self, named: Sequence[tuple[bytes, int]]) -> tuple[int, int] | None:
        """Begins to store the first of these (hash, block id), none of which is here. Returns the
        job, and how many of them it is; None when all slots are in use now."""
        slots: list[int] = []
        while len(slots) < len(named) and (slot := self._take_slot()) is not None:
            slots.append(slot)
        if not slots:
            return None
        taken = named[: len(slots)]
        names = [name for name, _ in taken]
        self._storing.update(names)
        job = self._begin(_Job(names, slots, False, set(range(self._num_processes))))
        self._tell(job, StoreMeta(job, [block for _, block in taken], slots))
        return job, len(taken)

    def load(self, names: Sequence[bytes], blocks: list[int]) -> int:
        """Begins to copy blocks with these hashes, which are all stored, to `blocks`. Returns the
        job."""
        slots = [self._stored[name] for name in names]
        self._pins.update(slots)
        job = self._begin(_Job(list(names), slots, True, set(range(self._num_processes))))
        self._tell(job, LoadMeta(job, blocks, slots))
        return job

    def apply(self, event: HostTierEvent) -> None:
        job = self._jobs.get(event.job)
        if job is None or event.process not in job.unanswered:
            return
        job.unanswered.discard(event.process)
        job.damaged.update(slot for slot in event.damaged if slot in job.slots)
        if not job.unanswered:
            self._conclude(event.job)

    def process_is_gone(self, process: int) -> None:
        """Forgets everything, since part of it went with the process."""
        self._totals["lost"] += len(self._stored)
        self.forget_all()
        for number, job in list(self._jobs.items()):
            job.is_lost = True
            job.unanswered.discard(process)
            if not job.unanswered:
                self._conclude(number)

    def forget_all(self) -> None:
        """Forgets what is stored; jobs go on."""
        for name in list(self._stored):
            self._forget(name)

    def take_finished(self) -> dict[int, bool]:
        """Returns jobs of which nothing is on its way any more, and whether all went well."""
        finished, self._finished = self._finished, {}
        return finished

    def _begin(self, job: _Job) -> int:
        self._next_job += 1
        self._jobs[self._next_job] = job
        return self._next_job

    def _tell(self, number: int, command: StoreMeta | LoadMeta) -> None:
        job = self._jobs[number]
        for process in range(self._num_processes):
            if not self._send(process, command):
                job.is_lost = True
                job.unanswered.discard(process)
        if not job.unanswered:
            self._conclude(number)

    def _conclude(self, number: int) -> None:
        job = self._jobs.pop(number)
        self._totals["damaged"] += len(job.damaged)
        (self._loaded if job.is_load else self._was_stored)(job)
        self._finished[number] = not job.is_lost and not job.damaged

    def _was_stored(self, job: _Job) -> None:
        for name, slot in zip(job.names, job.slots, strict=True):
            self._storing.discard(name)
            if job.is_lost or slot in job.damaged:
                self._free.append(slot)
            else:
                self._stored[name] = slot
                self._totals["stored"] += 1

    def _loaded(self, job: _Job) -> None:
        for name, slot in zip(job.names, job.slots, strict=True):
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]
            if self._stored.get(name) != slot:
                self._free_if_unused(slot)
            elif slot in job.damaged:
                self._forget(name)
            else:
                self._totals["loaded"] += 1

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for name, slot in self._stored.items():
            if slot not in self._pins:
                del self._stored[name]
                self._totals["displaced"] += 1
                return slot
        return None

    def _forget(self, name: bytes) -> None:
        self._free_if_unused(self._stored.pop(name))

    def _free_if_unused(self, slot: int) -> None:
        if slot not in self._pins:
            self._free.append(slot)

    def leftovers(self) -> list[str]:
        return [f"job {number} of the host tier" for number in self._jobs]
