"""KV from host memory: blocks come back when a prompt needs them that the cache has forgotten. What
lies on disk behind it is read if that is sooner done than computed, by what was seen of both.

    COMING     a job of the tier copies blocks
    NOTHING    blocks were damaged, or a disk did not answer: the prompt is computed
    EARLY      first layers are there, and no other request has anything to compute: the request
               has a row, and its step waits before each layer (`LoadTicket`)
                 the load is right, or the step's result is here ──▶ an ordinary row
                 the load fails ──▶ preempted; only then the step may go on, and its result is
                                    dropped

A layer is marked after its checksums were found right, so a result that comes back by itself is
right. Until one of these is known, no peer learns of the KV of a request that is EARLY: chunks that
a peer waits for are withheld, and its blocks cannot be found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contracts.request import Request
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.group_manager import IsBehind
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import ArrivalState, WriterKey
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.arrivals_by_job import ArrivalsByJob, TierArrival, TierCounters
from engine.sched.arrivals.source_rate import SourceRate
from engine.sched.counters import PrefillRate
from kv_transfer.base import ChunkLike, KVConnectorScheduler
from kv_transfer.metadata import KVConnectorMetadata
from kv_transfer.tier import LoadTicket, Tier

_READ_LIMIT_S = 30.0
"""No request waits longer for a disk."""


@dataclass(slots=True, eq=False)
class HostLoad(TierArrival):
    """Attributes:
    num_from_disk: Tokens among those that come.
    chunks: What is withheld while EARLY, with its steps.
    """

    num_from_disk: int = 0
    has_begun: bool = False
    chunks: list[tuple[int, ChunkLike]] = field(default_factory=list)


class HostSource:
    """Without a tier it never has anything. `preempt` takes a running request's row; set once,
    before the first step."""

    finds_certainly, writes_by_token = True, False

    def __init__(
        self,
        arrivals: Arrivals,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        prefill_rate: PrefillRate,
        short_tail: int = 0,
    ) -> None:
        """Takes `prefill_rate`, the speed of our own steps, against which reads from disk are
        weighed. `short_tail`: prompts of which no more tokens are left wait for all of their KV,
        since their step is recorded then, and sooner done than one that waits for layers."""
        self._arrivals = arrivals
        self._connector = connector
        self._tier = connector.host_tier
        self._kv_cache = kv_cache
        self._prefill_rate = prefill_rate
        self._short_tail = short_tail
        self._disk_rate = SourceRate()
        self.preempt: Callable[[Request], None] = _never
        self.counters = TierCounters()
        self.num_tokens_from_disk = 0
        """Counts those of all tokens that were on disk."""
        self._loads = ArrivalsByJob[HostLoad]("load")
        self._ticket: LoadTicket | None = None
        """The next step waits with it."""

    @property
    def is_on(self) -> bool:
        return self._tier is not None

    # As a source ------------------------------------------------------------------------------

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """At least one token is left to be computed."""
        if self._tier is None or request.needs_prompt_logprobs:
            return 0
        if not self._kv_cache.behind.is_chain:
            return self._find_in_groups(request, num_computed_tokens)
        block_size = self._kv_cache.least_block_size
        names = self._kv_cache.block_names(request, request.num_tokens - 1)
        first = num_computed_tokens // block_size
        count = self._tier.num_found(names, first)
        if self._tier.has_disk and count:
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
            own = self._prefill_rate.tokens_per_s
            request.reads_disk = self._disk_rate.is_worth(
                num_read, num_tokens, own, trusts_larger=False
            )
            self.counters.cheaper_to_compute += not request.reads_disk
        return request.reads_disk

    def _find_in_groups(self, request: Request, num_computed_tokens: int) -> int:
        """A prefix is here if all groups have theirs of it: there is no part of a state."""
        assert self._tier is not None
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
        assert self._tier is not None
        stop = self._kv_cache.behind.find(request, request.num_tokens - 1, is_behind)
        if stop <= num_computed_tokens:
            return 0, 0
        held, coming = self._kv_cache.behind.names(request, stop)
        if self._tier.num_found(held + coming, len(held)) < len(coming):
            return 0, 0
        return stop - num_computed_tokens, sum(map(self._lies_on_disk, coming))

    def _lies_here(self, name: BlockHash) -> bool:
        return self._tier is not None and self._tier.tier_of(name) is not None

    def _lies_in_memory(self, name: BlockHash) -> bool:
        return self._tier is not None and self._tier.tier_of(name) is Tier.HOST

    def _lies_on_disk(self, name: BlockHash) -> bool:
        return self._tier is not None and self._tier.tier_of(name) is Tier.DISK

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        assert self._tier is not None
        num_stop = num_computed_tokens + num_tokens
        names, blocks = self._kv_cache.behind.blocks(request, num_computed_tokens, num_stop)
        load = HostLoad(request, self, is_first=request.num_preemptions == 0)
        num_read = sum(map(self._lies_on_disk, names)) * self._kv_cache.least_block_size
        load.num_from_disk = min(num_tokens, num_read)
        self._arrivals.add(load)
        self._arrivals.begin(load, num_computed_tokens, num_tokens, ArrivalState.COMING)
        request.num_computed_tokens = num_stop
        if load.is_first and request.num_cached_tokens is not None:
            request.num_cached_tokens += num_tokens
        self._loads.add(load, self._tier.load(names, blocks))

    def stop(self, arrival: HostLoad) -> WriterKey | None:
        return arrival.job if self._loads.take(arrival) else None

    # What the tier says -----------------------------------------------------------------------

    def check_reads(self) -> None:
        """Gives up on blocks that a disk does not bring in time, before each step: their prompts
        are computed."""
        for load in self._loads.overdue(_READ_LIMIT_S, _waits_for_disk):
            if self._tier and self._tier.give_up(load.job):
                self._disk_rate.took(load.num_from_disk, load.waited_s)
                load.request.reads_disk = False
                self._loads.take(load)
                self._load_done(load, is_right=False)

    def loads_begun(self, jobs: list[int]) -> None:
        """Records that the first layers of these loads are there."""
        for job in jobs:
            if (load := self._loads.get(job)) is not None:
                load.has_begun = True

    def jobs_done(self, jobs: dict[int, bool]) -> None:
        """Goes on after jobs of the tier, of which nothing is on its way any more. By job: whether
        it is right."""
        if self._tier is None or not jobs:
            return
        for num_blocks, seconds in self._tier.take_reads():
            self._disk_rate.took(num_blocks * self._kv_cache.least_block_size, seconds)
        for job, is_right in jobs.items():
            if (load := self._loads.get(job)) is not None:
                self._loads.take(load)
                self._load_done(load, is_right)
            if not is_right:
                self._tier.release(job)

    def _load_done(self, load: HostLoad, is_right: bool) -> None:
        self._count(load, is_right)
        if load.state is ArrivalState.COMING and is_right:
            self._arrivals.here(load, load.request.num_computed_tokens)
        elif load.state is ArrivalState.COMING:
            self._arrivals.failed(load)
        elif load.state is ArrivalState.EARLY and is_right:
            self._settle(load)
        elif load.state is ArrivalState.EARLY:
            self.preempt(load.request)

    def _count(self, load: HostLoad, is_right: bool) -> None:
        if is_right:
            self.counters.came(load)
            self.num_tokens_from_disk += load.num_from_disk
        elif load.is_first and load.request.num_cached_tokens is not None:
            load.request.num_cached_tokens -= load.num_coming

    # Requests that compute while layers come --------------------------------------------------

    def start_early(self) -> Request | None:
        """Returns a request that can compute while the rest of its layers come: it needs a row, and
        the next step for itself. None: there is none. Steps wait for one layer after the other,
        which several groups do not lie in."""
        if not self._kv_cache.behind.is_chain:
            return None
        for load in self._loads:
            request = load.request
            if load.state is not ArrivalState.COMING:
                continue
            if self._arrivals.has_next(load, request.num_computed_tokens):
                continue  # Another source is asked for what follows, once all of this is here.
            if request.num_tokens - request.num_computed_tokens <= self._short_tail:
                continue
            ticket = self._tier.ticket(load.job) if self._tier and load.has_begun else None
            if ticket is not None:
                self._ticket = ticket
                self._arrivals.move(load, ArrivalState.EARLY)
                return request
        return None

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

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return self._loads.leftovers()


def _waits_for_disk(load: HostLoad) -> bool:
    return load.num_from_disk > 0 and load.state is ArrivalState.COMING


def _never(request: Request) -> None:
    raise AssertionError("no load can fail before there are rows")
