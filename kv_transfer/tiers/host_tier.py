"""Which blocks lie in host memory and on disk, by hash: the half beside the scheduler.

A slot of host memory is the same on every rank and in every transfer process.

    free ── store, fetch ──▶ FILLING ── all processes ──▶ STORED ◀── load: pinned until it is done
      ▲                         │ one says no               │  ╲
      └─────────────────────────┴─── displaced, damaged ────┘   spill ──▶ on disk ──▶ fetch

Stored blocks are displaced in the order of their last use; those that will be next are written to
disk beforehand. A lookup uses blocks from the last to the first: a prefix is of use without its
tail, but never the other way round.

Nothing is found and nothing begins while a process has not said what it holds (`TierContents`): at
the start, and when one has died. A block counts that every process has. So what outlives a
process, or the whole engine, is found again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kv_transfer.base import HostTier
from kv_transfer.tier import (
    DiskUnwritten,
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
    TierContents,
    TierEvent,
    TierOff,
)
from kv_transfer.tiers.disk_index import DiskIndex
from kv_transfer.tiers.load_pieces import LoadPieces
from kv_transfer.tiers.load_tickets import LoadTickets
from kv_transfer.tiers.slot_table import SlotTable
from kv_transfer.tiers.store_index import StoreIndex
from kv_transfer.tiers.tier_jobs import Send, TierJobs
from kv_transfer.tiers.tier_task import TierTask

_MOST_SPILLED = 16
"""Blocks that one job writes to disk; there is one such job at a time."""
_SHARE_AHEAD = 8
"""One block in this many is on disk before it is displaced."""

logger = logging.getLogger(__name__)


class PooledHostTier(HostTier):
    """`num_slots` blocks of host memory, and `num_files` on disk. `take_finished` says what has
    become of jobs."""

    def __init__(
        self,
        num_slots: int,
        num_processes: int,
        send: Send,
        num_files: int = 0,
        release: Callable[[LoadTicket], None] | None = None,
        num_places: int = 0,
        *,
        has_store: bool = False,
    ) -> None:
        """`release`, `num_places`: this many loads are followed by layer (`load_marks`)."""
        self.capacity = num_slots + num_files
        self._num_slots = num_slots
        self._num_processes = num_processes
        self._send = send
        self._slots = SlotTable(num_slots)
        self._filling: set[bytes] = set()
        self._spilling: set[bytes] = set()
        self.disk = DiskIndex(num_files, self._remove_files)
        self.has_disk = num_files > 0
        self.has_store = has_store
        self.store_index = StoreIndex(num_processes, send) if has_store else None
        self._jobs = TierJobs(num_processes, send, self._conclude)
        self._pieces = LoadPieces(self._jobs.new_number)
        self._finished: dict[int, bool] = {}
        self._tickets = LoadTickets(num_places, release)
        self._unheard = set(range(num_processes))
        """Processes that have not said what they hold."""
        self._contents: dict[int, TierContents] = {}  # Until all have reported.
        self._is_first = True
        self._off: dict[Tier, str] = {}
        self._totals = Counter[str]()

    # What is here -----------------------------------------------------------------------------

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def counters(self) -> dict[str, float]:
        names = ("stored", "loaded", "damaged", "lost", "spilled", "fetched")
        totals = {f"host_tier_{name}_blocks": float(self._totals[name]) for name in names}
        return {
            **totals,
            **{f"{tier}_tier_off": float(tier in self._off) for tier in (Tier.HOST, Tier.DISK)},
            "host_tier_blocks": float(len(self._slots.stored)),
            "host_tier_displaced_blocks": float(self._slots.num_displaced),
            "host_tier_residency_seconds": self._slots.residency_s,
            "disk_tier_blocks": float(len(self.disk)),
            "disk_tier_evicted_blocks": float(self.disk.num_evicted),
            "disk_tier_residency_seconds": self.disk.residency_s,
            "disk_tier_damaged_files": float(self._totals["damaged_files"]),
            "disk_tier_unwritten_blocks": float(self.disk.num_unwritten),
            **(self.store_index.counters if self.store_index is not None else {}),
        }

    @property
    def is_ready(self) -> bool:
        return not self._unheard and not self._contents and Tier.HOST not in self._off

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots.stored or name in self._filling

    def tier_of(self, name: bytes) -> Tier | None:
        if not self.is_ready:
            return None
        if name in self._slots.stored:
            return Tier.HOST
        return Tier.DISK if name in self.disk else None

    def num_found(self, names: Sequence[bytes], start: int) -> int:
        if not self.is_ready:
            return 0
        stored, disk = self._slots.stored, self.disk
        for name in reversed(names):
            if name in stored:
                self._slots.use(name)
            elif name in disk:
                disk.use(name)
        count = num_stored = num_fetched = 0
        for name in names[start:]:
            if name in stored:
                num_stored += 1
            elif name in disk and name not in self._filling:
                num_fetched += 1
            else:
                break
            count += 1
        # Slots of the prefix itself cannot take what is fetched for it.
        if num_fetched == 0 or num_fetched <= self._slots.num_to_take - num_stored:
            return count
        return next((i for i, name in enumerate(names[start:]) if name not in stored), count)

    @property
    def may_ask_store(self) -> bool:
        return self.is_ready and self.store_index is not None and self.store_index.is_on

    def num_with_room(self, names: Sequence[bytes]) -> int:
        if not self.is_ready:
            return 0
        busy = (i for i, name in enumerate(names) if name in self._filling)
        return self._slots.num_with_room(names[: next(busy, len(names))])

    # Jobs -------------------------------------------------------------------------------------

    def ask_store(self, names: Sequence[bytes], *, is_chain: bool = True) -> int:
        assert self.store_index is not None
        job = self._jobs.new_number()
        self.store_index.ask(job, list(names), is_chain=is_chain)
        return job

    def store(self, named: Sequence[tuple[bytes, int]]) -> tuple[int, int] | None:
        slots: list[int] = []
        while (
            self.is_ready and len(slots) < len(named) and (slot := self._slots.take()) is not None
        ):
            slots.append(slot)
        if not slots:
            return None
        names = [name for name, _ in named[: len(slots)]]
        blocks = [block for _, block in named[: len(slots)]]
        self._filling.update(names)
        job = self._jobs.new_number()
        self._jobs.begin(StoreMeta(job, blocks, slots, names), names)
        return job, len(slots)

    def load(self, names: Sequence[bytes], blocks: list[int], behind: Tier = Tier.DISK) -> int:
        job = self._jobs.new_number()
        fresh = self._slots.take_for(names)
        self._filling.update(fresh)
        slots = [fresh[n] if n in fresh else self._slots.stored[n] for n in names]
        for number, cut in self._pieces.cut(job, len(names), behind):
            load, some = LoadMeta(number, blocks[cut], slots[cut]), list(names[cut])
            fetched = [name for name in some if name in fresh]
            if fetched:
                fetch = FetchMeta(number, fetched, [fresh[name] for name in fetched], behind)
                self._jobs.begin(fetch, some, load)
            else:
                self._begin_load(load, some, behind)
        return job

    def ticket(self, job: int) -> LoadTicket | None:
        return self._jobs.ticket(job)

    def release(self, job: int) -> None:
        self._tickets.release(job)

    def give_up(self, job: int) -> bool:
        return self._jobs.give_up(self._pieces.of(job))

    def take_reads(self) -> list[tuple[int, float]]:
        return self.disk.take_reads()

    def take_finished(self) -> dict[int, bool]:
        """Returns jobs of which nothing is on its way any more, and whether all went well."""
        finished, self._finished = self._finished, {}
        return finished

    def take_begun(self) -> list[int]:
        """Returns loads whose first layers are in the blocks, of all processes."""
        return self._jobs.take_begun()

    # What processes say -----------------------------------------------------------------------

    def apply(self, event: TierEvent) -> None:
        match event:
            case TierContents():
                self._add_contents(event)
            case TierOff(_, tier, reason):
                self._turn_off(tier, reason)
            case DiskUnwritten(reason=reason):
                self.disk.rest(reason)
            case LoadBegun():
                self._jobs.load_begun(event)
            case StoreFound():
                if self.store_index is not None:
                    self.store_index.answered(event)
            case HostTierEvent():
                self._jobs.answered(event)

    def process_is_gone(self, process: int) -> None:
        """Finds nothing until it is back and has said what is left."""
        self._unheard.add(process)
        self._contents.pop(process, None)
        if self.store_index is not None:
            self.store_index.process_is_gone(process)
        self._jobs.process_is_gone(process)

    def forget_all(self) -> None:
        self._jobs.forget_stored()
        for name in list(self._slots.stored):
            self._slots.forget(name)
        self.disk.clear()
        if self.store_index is not None:
            self.store_index.clear()
        for process in range(self._num_processes):
            self._send(process, ForgetMeta(None))

    def _add_contents(self, contents: TierContents) -> None:
        self._contents[contents.process] = contents
        self._totals["damaged_files"] += contents.damaged_files
        for tier, reason in contents.off.items():
            self._turn_off(tier, reason)
        self._unheard.discard(contents.process)
        self._reconcile()

    def _reconcile(self) -> None:
        """Keeps what every process holds, once all have reported and no job is on its way."""
        if self._unheard or self._jobs or not self._contents:
            return
        told, self._contents = list(self._contents.values()), {}
        if self._is_first:
            self._is_first = False
            self._slots.fill(told[0].slots)
            self.disk.add(told[0].files if self.has_disk else ())
        for name, slot in list(self._slots.stored.items()):
            if any(contents.slots.get(slot) != name for contents in told):
                self._slots.forget(name)
                self._totals["lost"] += 1
        if self.has_disk:
            self.disk.keep_common([contents.files for contents in told])

    def _turn_off(self, tier: Tier, reason: str) -> None:
        if tier in self._off:
            return
        self._off[tier] = reason
        logger.warning("KV in the %s tier is off, and serving goes on: %s", tier, reason)
        if tier is not Tier.DISK and self.store_index is not None:
            self.store_index.turn_off()
        if tier is Tier.STORE:
            return
        self.disk.clear()
        self.has_disk = False

    # Inside -----------------------------------------------------------------------------------

    def _begin_load(self, load: LoadMeta, names: list[bytes], behind: Tier) -> None:
        if self._tickets.has_free and behind is not Tier.STORE:
            ticket = self._tickets.issue(self._jobs.new_number())
            load = LoadMeta(load.job, load.blocks, load.slots, ticket)
        self._jobs.begin(load, names)

    def _conclude(self, number: int, job: TierTask) -> None:
        is_right = job.is_right
        match job.command:
            case StoreMeta(slots=slots):
                self._totals["damaged"] += len(job.damaged)
                whole = self._filled(job, job.names, slots, "stored")
                if self.store_index is not None:
                    self.store_index.stored(whole)
            case FetchMeta(names=names, slots=slots, tier=behind):
                whole = self._filled(job, names, slots, "fetched")
                failed = [n for n, s in zip(names, slots, strict=True) if s in job.damaged]
                if behind is Tier.STORE and self.store_index is not None:
                    self.store_index.came(whole, failed)
                else:
                    self._totals["damaged_files"] += len(failed)
                    self.disk.drop(failed)
                if is_right and job.load is not None and not job.is_given_up:
                    if behind is Tier.DISK:
                        self.disk.took(len(names), time.monotonic() - job.begun_at)
                    self._begin_load(job.load, job.names, behind)
                    return
                self._unpin(job, job.load.slots if job.load is not None else [])
            case SpillMeta():
                self._spilled(job, is_right)
                return
            case PutMeta():
                self._given(job)
                return
            case LoadMeta(slots=slots, ticket=ticket):
                self._totals["damaged"] += len(job.damaged)
                self._totals["loaded"] += len(slots) if is_right else 0
                if ticket is not None:
                    self._tickets.ended(number, ticket, is_right=is_right)
                self._unpin(job, slots)
        if (ended := self._pieces.ended(number, is_right=is_right)) is not None:
            self._finished[ended[0]] = ended[1]
        self._reconcile()
        self._spill_ahead()
        self._give_ahead()

    def _filled(self, job: TierTask, names: list[bytes], slots: list[int], how: str) -> list[bytes]:
        """Returns the names of blocks that are whole."""
        whole: list[bytes] = []
        for name, slot in zip(names, slots, strict=True):
            self._filling.discard(name)
            if job.is_lost or slot in job.damaged:
                self._slots.give_back(slot)
            else:
                self._slots.put(name, slot)
                self._totals[how] += 1
                whole.append(name)
        return whole

    def _unpin(self, job: TierTask, slots: list[int]) -> None:
        for name, slot in zip(job.names, slots, strict=True):
            self._slots.unpin(name, slot, is_damaged=slot in job.damaged)

    # Disk -------------------------------------------------------------------------------------

    def _spill_ahead(self) -> None:
        """Begins to write blocks to disk that would be displaced soon."""
        ahead = max(1, self._num_slots // _SHARE_AHEAD)
        is_due = self.has_disk and self.is_ready and self._slots.num_free < ahead
        if not is_due or self._spilling or self.disk.is_resting:
            return
        going = self._slots.next_to_go(ahead)
        due = [(name, slot) for name, slot in going if name not in self.disk][:_MOST_SPILLED]
        if due:
            names, slots = [name for name, _ in due], [slot for _, slot in due]
            self._spilling.update(names)
            self._slots.pin(slots)
            self._jobs.begin(SpillMeta(self._jobs.new_number(), slots), names)

    def _spilled(self, job: TierTask, is_right: bool) -> None:
        self._spilling.difference_update(job.names)
        whole = job.whole
        job.damaged.clear()
        self._unpin(job, job.command.slots)
        if self.has_disk:
            self._totals["spilled"] += len(whole)
            self.disk.written(whole, job.names)
        self._reconcile()
        if is_right:
            self._spill_ahead()

    def _give_ahead(self) -> None:
        """Begins to give the store what was stored last."""
        index = self.store_index
        if index is None or index.is_putting or not self.is_ready:
            return
        if due := index.next_due(self._slots):
            names, slots = [name for name, _ in due], [slot for _, slot in due]
            self._slots.pin(slots)
            self._jobs.begin(PutMeta(self._jobs.new_number(), slots), names)

    def _given(self, job: TierTask) -> None:
        whole = job.whole
        job.damaged.clear()
        self._unpin(job, job.command.slots)
        if self.store_index is not None:
            self.store_index.given(whole)
        self._reconcile()
        self._give_ahead()

    def _remove_files(self, names: list[bytes]) -> None:
        for process in range(self._num_processes):
            self._send(process, ForgetMeta(names))

    def leftovers(self) -> list[str]:
        num_lost = self._slots.num_unused if not self._jobs else 0
        lost = [f"{num_lost} slots of the host tier"] if num_lost else []
        return self._jobs.leftovers() + lost
