"""KV from host memory: blocks come back when a prompt needs them that the cache has forgotten. What
lies on disk behind it is read if that is sooner done than computed, by what was seen of both.

    COMING     a job of the tier copies blocks
    NOTHING    blocks were damaged, or a disk did not answer: the prompt is computed
    EARLY      first layers are there, no other request has anything to compute, and no graph would
               compute the rest sooner, once all of them are: the request has a row, and its step
               waits before each layer (`LoadTicket`)
                 the load is right, or the step's result is here ──▶ an ordinary row
                 the load fails ──▶ preempted; only then the step may go on, and its result is
                                    dropped

A layer is marked after its checksums were found right, so a result that comes back by itself is
right. Until one of these is known, no peer learns of the KV of a request that is EARLY: chunks that
a peer waits for are withheld, and its blocks cannot be found in the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.contracts.request import Request
from engine.contracts.steps.step_launches import StepLaunches, StepParts
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.group_manager import IsBehind
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import ArrivalState
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.source_rate import SourceRate
from engine.sched.arrivals.tier_source import TierArrival, TierSource
from engine.sched.counters import PrefillRate
from kv_transfer.base import ChunkLike, KVConnectorScheduler
from kv_transfer.metadata import KVConnectorMetadata, KVConnectorOutput
from kv_transfer.tier import LoadTicket, Tier

_READ_LIMIT_S = 30.0
"""No request waits longer for a disk."""


@dataclass(slots=True, eq=False)
class HostLoad(TierArrival):
    """Attributes:
    begun_at: When its first layers were there; None: they are not.
    chunks: What is withheld while EARLY, with its steps.
    """

    begun_at: float | None = None
    chunks: list[tuple[int, ChunkLike]] = field(default_factory=list)


class HostSource(TierSource[HostLoad]):
    """`preempt` takes a running request's row; set once, before the first step."""

    finds_certainly, behind = True, Tier.DISK

    def __init__(
        self,
        arrivals: Arrivals,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        prefill_rate: PrefillRate,
        launches: StepLaunches | None = None,
    ) -> None:
        """Takes `launches`, what the steps of prompts will be once all of their KV is here."""
        super().__init__(arrivals, connector.host_tier, kv_cache, prefill_rate)
        self._connector = connector
        self._launches = launches or StepLaunches(none="steps are not known")
        self._copies = SourceRate()
        """How quickly the rest of a load follows its first layers."""
        self.preempt: Callable[[Request], None] = _never
        self._ticket: LoadTicket | None = None
        """The next step waits with it."""

    # As a source ------------------------------------------------------------------------------

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """At least one token is left to be computed."""
        if not self._kv_cache.behind.is_chain:
            return self._find_in_groups(request, num_computed_tokens)
        block_size = self._kv_cache.least_block_size
        names = self._kv_cache.block_names(request, request.num_tokens - 1)
        first = num_computed_tokens // block_size
        count = self.tier.num_found(names, first)
        if self.tier.has_disk and count:
            count = self._num_worth_it(request, names[first : first + count])
        return count * block_size

    def _num_worth_it(self, request: Request, found: list[BlockHash]) -> int:
        """Returns how many of these blocks are sooner here than computed: all of them, or those
        before the first that lies on disk."""
        on_disk = [i for i, name in enumerate(found) if self._lies_on_disk(name)]
        if not on_disk:
            return len(found)
        saved = (len(found) - on_disk[0]) * self._kv_cache.least_block_size
        is_worth_it = self._is_worth_reading(request, len(on_disk), saved)
        return len(found) if is_worth_it else on_disk[0]

    def _is_worth_reading(self, request: Request, num_blocks: int, num_tokens: int) -> bool:
        """Returns whether blocks are sooner read from disk than tokens are computed. It is decided
        once a request, which may ask before every step."""
        if request.reads_disk is None:
            num_read = num_blocks * self._kv_cache.least_block_size
            request.reads_disk = self.is_worth(num_read, num_tokens, trusts_larger=False)
        return request.reads_disk

    def _find_in_groups(self, request: Request, num_computed_tokens: int) -> int:
        """A prefix is here if all groups have theirs of it: there is no part of a state."""
        most, on_disk = self._longest(request, num_computed_tokens, self._lies_here)
        if most and not on_disk:
            return most
        least, _ = self._longest(request, num_computed_tokens, self._lies_in_memory)
        if most > least and self._is_worth_reading(request, on_disk, most - least):
            return most
        return least

    def _longest(
        self, request: Request, num_computed_tokens: int, is_behind: IsBehind
    ) -> tuple[int, int]:
        """Returns the tokens that come behind the computed ones, and how many of their blocks are
        read from disk. 0: there are none, or host memory has no room for what is read."""
        stop = self._kv_cache.behind.find(request, request.num_tokens - 1, is_behind)
        if stop <= num_computed_tokens:
            return 0, 0
        held, coming = self._kv_cache.behind.names(request, stop)
        if self.tier.num_found(held + coming, len(held)) < len(coming):
            return 0, 0
        return stop - num_computed_tokens, sum(map(self._lies_on_disk, coming))

    def _lies_here(self, name: BlockHash) -> bool:
        return self.tier.tier_of(name) is not None

    def _lies_in_memory(self, name: BlockHash) -> bool:
        return self.tier.tier_of(name) is Tier.HOST

    def _lies_on_disk(self, name: BlockHash) -> bool:
        return self.tier.tier_of(name) is Tier.DISK

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        load = HostLoad(request, self)
        self._arrivals.begin(load, num_computed_tokens, num_tokens, ArrivalState.COMING)
        request.num_computed_tokens = load.stop
        self.load(load)

    def num_read(self, load: HostLoad, names: Sequence[BlockHash]) -> int:
        num_blocks = sum(map(self._lies_on_disk, names))
        return min(load.num_coming, num_blocks * self._kv_cache.least_block_size)

    # What the tier says -----------------------------------------------------------------------

    def check(self) -> None:
        for load in self.give_up(_READ_LIMIT_S, _waits_for_disk):
            load.request.reads_disk = False

    def update(self, output: KVConnectorOutput) -> None:
        for job in output.host_begun:
            if (load := self.loads.get(job)) is not None:
                load.begun_at = time.monotonic()
        for num_blocks, seconds in self.tier.take_reads() if output.host_jobs else ():
            self.rate.took(num_blocks * self._kv_cache.least_block_size, seconds)
        for load, is_right in self.loads.ended(output.host_jobs):
            self.loaded(load, is_right=is_right)

    def loaded(self, load: HostLoad, *, is_right: bool) -> None:
        super().loaded(load, is_right=is_right)
        if is_right and load.begun_at is not None:
            self._copies.took(load.num_coming, time.monotonic() - load.begun_at)
        if load.state is ArrivalState.EARLY and is_right:
            self._settle(load)
        elif load.state is ArrivalState.EARLY:
            self.preempt(load.request)

    # Requests that compute while layers come --------------------------------------------------

    def start_early(self) -> Request | None:
        """Returns a request that can compute while the rest of its layers come: it needs a row, and
        the next step for itself. None: there is none. Steps wait for one layer after the other,
        which several groups do not lie in."""
        if not self._kv_cache.behind.is_chain:
            return None
        for load in self.loads:
            request = load.request
            if load.state is not ArrivalState.COMING:
                continue
            if self._arrivals.has_next(load, request.num_computed_tokens):
                continue  # Another source is asked for what follows, once all of this is here.
            ticket = None if load.begun_at is None else self.tier.ticket(load.job)
            if ticket is not None and not self._is_sooner_whole(load):
                self._ticket = ticket
                self._arrivals.move(load, ArrivalState.EARLY)
                return request
        return None

    def _is_sooner_whole(self, load: HostLoad) -> bool:
        """Returns whether the rest of a prompt is sooner computed once all of its KV is here, by a
        graph. A step that waits for layers is launched one by one, and so is one with images."""
        num_left = load.request.num_tokens - load.stop
        has_images = load.request.spec.has_images_behind(load.stop)
        if has_images or isinstance(self._launches.find(StepParts(0, 1, num_left)), str):
            return False
        assert load.begun_at is not None
        left_s = self._copies.seconds_for(load.num_coming) - (time.monotonic() - load.begun_at)
        one_by_one = self._launches.one_by_one
        return one_by_one.outlasts(one_by_one.work(load.stop, num_left), max(left_s, 0.0))

    def build_meta(self, step_id: int, chunks: list[ChunkLike]) -> KVConnectorMetadata | None:
        """Tells of the chunks of exports that are certain to be right. Returns what workers must
        know of the step."""
        if not self._arrivals.any_in(ArrivalState.EARLY):
            return self._connector.build_connector_meta(step_id, chunks)
        certain, is_any_withheld = list[ChunkLike](), False
        for chunk in chunks:
            load = self._early(chunk.request.request_id)
            if load is None:
                certain.append(chunk)
            else:
                load.chunks.append((step_id, chunk))
                is_any_withheld = True
        kv = self._connector.build_connector_meta(step_id, certain)
        ticket, self._ticket = self._ticket, None
        if not is_any_withheld and ticket is None:
            return kv
        return KVConnectorMetadata(is_any_withheld or (kv is not None and kv.save_kv), ticket)

    def _early(self, request_id: str) -> HostLoad | None:
        load = self._arrivals.get(request_id)
        return load if isinstance(load, HostLoad) and load.state is ArrivalState.EARLY else None

    def waits_for_layers(self, request: Request) -> bool:
        """Returns whether a request computes while the rest of its layers come."""
        return self._early(request.request_id) is not None

    def settle(self, request: Request) -> None:
        """Tells what was withheld, since the request's KV is right."""
        if (load := self._early(request.request_id)) is not None:
            self._settle(load)

    def _settle(self, load: HostLoad) -> None:
        self._arrivals.move(load, ArrivalState.ENDED)
        for step_id, chunk in load.chunks:
            self._connector.build_connector_meta(step_id, [chunk])

    def left(self, request: Request) -> None:
        """Forgets a request that leaves its row."""
        if (load := self._early(request.request_id)) is not None:
            self._arrivals.move(load, ArrivalState.ENDED)


def _waits_for_disk(load: HostLoad) -> bool:
    return load.num_read > 0 and load.state is ArrivalState.COMING


def _never(request: Request) -> None:
    raise AssertionError("no load can fail before there are rows")
