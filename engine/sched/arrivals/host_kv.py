"""KV in host memory: full blocks go there while they are in the cache, and come back when a prompt
needs them that the cache has forgotten. What lies on disk behind it is read if that is sooner done
than computed, by what was seen of both.

A block                                       A request
    offered    it is full and certain             waiting ──▶ LOADING ──▶ READY ──▶ a row
    storing    held while it is copied               ▲         │ │           │        ▲
    stored     the cache may forget it               └─ damaged┴─┼─ reclaim ─┘        │
                                                                 └── EARLY (`EarlyLoads`)

A request that loads has all blocks that it needs, as one whose KV comes from a peer. One that ends
meanwhile leaves its blocks behind until nothing writes them any more.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from engine.config import SchedulingPolicy
from engine.contracts.request import Request, RequestStatus
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.early_loads import EarlyLoads
from engine.sched.arrivals.source_rate import SourceRate
from engine.sched.counters import PrefillRate
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import HostTier
from kv_transfer.tier import Tier

_SHARE_HELD = 8
"""At most one block in this many is held to be stored: requests come first."""
_READ_LIMIT_S = 30.0
"""Nothing waits longer for a disk."""
_LONGEST_LOOK_S = 1.0
"""Looks at what waits follow each other sooner, unless this process stands still."""


@dataclass(slots=True, eq=False)
class _Load:
    request: Request
    job: int
    num_tokens: int
    num_from_disk: int
    """Tokens among them."""
    is_first: bool
    """The request was not preempted before."""
    waited_s: float = 0.0
    has_begun: bool = False
    is_early: bool = False


class HostKV:
    """Without a `tier` it never has anything to do."""

    def __init__(
        self,
        tier: HostTier | None,
        early: EarlyLoads,
        kv_cache: KVCacheManager,
        fence: StepFence,
        waiting: RequestQueue,
        policy: SchedulingPolicy,
        prefill_rate: PrefillRate,
        short_tail: int = 0,
    ) -> None:
        """Takes `prefill_rate`, the speed of our own steps, against which reads from disk are
        weighed. `short_tail`: prompts of which no more tokens are left wait for all of their KV,
        since their step is recorded then, and sooner done than one that waits for layers."""
        self._tier = tier
        self._prefill_rate = prefill_rate
        self._short_tail = short_tail
        self._disk_rate = SourceRate()
        self._looked_at = time.monotonic()
        self._early = early
        self._kv_cache = kv_cache
        self._fence = fence
        self._waiting = waiting
        self.ready = RequestQueue(policy)
        """Requests that have blocks and KV, and lack only a row."""
        self.num_loaded_tokens = 0
        self.num_tokens_from_disk = 0
        """Counts those of `num_loaded_tokens` that were on disk."""
        self.num_tokens_loaded_again = 0
        """Counts those of them whose requests had been preempted, and looked up before."""
        self.num_cheaper_to_compute = 0
        """Prompts that computed what lies on disk."""
        self._offered: deque[tuple[KVCacheBlock, BlockHash]] = deque(maxlen=kv_cache.num_blocks)
        self._storing: dict[int, list[KVCacheBlock]] = {}  # [job]
        self._num_storing = 0
        self._loads: dict[str, _Load] = {}  # [request id]
        self._of_job: dict[int, _Load] = {}
        self._held: dict[int, list[KVCacheBlock]] = {}  # [job]
        if tier is not None:
            kv_cache.block_pool.on_cached = self._offer

    @property
    def is_on(self) -> bool:
        return self._tier is not None

    @property
    def num_with_blocks(self) -> int:
        """Returns the requests that have blocks and no row."""
        return len(self._loads) + len(self.ready)

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    # Blocks go there --------------------------------------------------------------------------

    def _offer(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        self._offered.append((block, block.block_hash))

    def store_offered(self) -> None:
        """Begins to store what was offered and is still in its block, as much as may be held."""
        tier, pool = self._tier, self._kv_cache.block_pool
        most = max(1, pool.num_blocks // _SHARE_HELD)
        if tier is None or not self._offered or self._num_storing >= most:
            return
        chosen: list[KVCacheBlock] = []
        named: list[tuple[BlockHash, int]] = []
        while self._offered and self._num_storing + len(chosen) < most:
            block, name = self._offered.popleft()
            if block.block_hash == name and name not in tier:
                chosen.append(block)
                named.append((name, block.block_id))
        begun = tier.store(named) if named else None
        if begun is None:
            return
        job, count = begun
        pool.touch(chosen[:count])
        self._storing[job] = chosen[:count]
        self._num_storing += count

    # Blocks come back -------------------------------------------------------------------------

    def num_loadable(self, request: Request, num_cached_tokens: int) -> int:
        """Returns the number of tokens behind the cached ones whose KV can be loaded; at least one
        token is left to be computed."""
        if self._tier is None or request.needs_prompt_logprobs:
            return 0
        block_size = self._kv_cache.least_block_size
        names = self._kv_cache.block_names(request, request.num_tokens - 1)
        first = num_cached_tokens // block_size
        count = self._tier.num_found(names, first)
        if self._tier.has_disk and count:
            count = self._num_worth_it(request, names[first : first + count], self._tier)
        return count * block_size

    def _num_worth_it(self, request: Request, found: list[BlockHash], tier: HostTier) -> int:
        """Returns how many of these blocks are sooner here than computed: all of them, or those
        before the first that lies on disk. A request gets it once; it may ask before every step."""
        on_disk = [i for i, name in enumerate(found) if tier.tier_of(name) is Tier.DISK]
        if not on_disk:
            return len(found)
        if request.reads_disk is None:
            block_size, own = self._kv_cache.least_block_size, self._prefill_rate.tokens_per_s
            seconds = self._disk_rate.seconds_for(len(on_disk) * block_size)
            saved = (len(found) - on_disk[0]) * block_size
            request.reads_disk = not own or self._disk_rate.verdict(seconds, saved / own).is_to_take
            self.num_cheaper_to_compute += not request.reads_disk
        return len(found) if request.reads_disk else on_disk[0]

    def start(self, request: Request, num_cached_tokens: int, num_tokens: int) -> None:
        """Begins to load `num_tokens` tokens: blocks for the whole need are allocated."""
        assert self._tier is not None
        block_size = self._kv_cache.least_block_size
        first, stop = (
            num_cached_tokens // block_size,
            (num_cached_tokens + num_tokens) // block_size,
        )
        names = self._kv_cache.block_names(request, stop * block_size)[first:]
        blocks = self._kv_cache.get_block_ids(request.request_id)[0][first:stop]
        request.num_computed_tokens = num_cached_tokens + num_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        num_from_disk = sum(self._tier.tier_of(name) is Tier.DISK for name in names) * block_size
        is_first = request.num_preemptions == 0
        if is_first and request.num_cached_tokens is not None:
            request.num_cached_tokens += num_tokens
        job = self._tier.load(names, blocks)
        load = _Load(request, job, num_tokens, num_from_disk, is_first)
        self._loads[request.request_id] = self._of_job[load.job] = load

    def check_reads(self) -> None:
        """Gives up on blocks that a disk does not bring in time, before each step: their prompts
        are computed. Time in which nothing looked counts little: the disk may have answered."""
        now = time.monotonic()
        waited_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        for load in [load for load in self._loads.values() if load.num_from_disk]:
            load.waited_s += waited_s
            if self._tier and load.waited_s > _READ_LIMIT_S and self._tier.give_up(load.job):
                self._disk_rate.took(load.num_from_disk, load.waited_s)
                load.request.reads_disk = False
                self._load_done(self._of_job.pop(load.job), is_right=False)

    def loads_begun(self, jobs: list[int]) -> None:
        """Records that the first layers of these loads are there."""
        for job in jobs:
            if (load := self._of_job.get(job)) is not None:
                load.has_begun = True

    def start_early(self) -> Request | None:
        """Returns a request that can compute while the rest of its layers come: it needs a row, and
        the next step for itself. None: there is none."""
        for load in self._loads.values():
            if load.request.prefix_peer:
                continue  # A peer is asked for what follows, once all of this is here.
            left = load.request.num_tokens - load.request.num_computed_tokens
            if left <= self._short_tail:
                continue
            ticket = self._tier.ticket(load.job) if self._tier and load.has_begun else None
            if ticket is not None:
                load.is_early = True
                del self._loads[load.request.request_id]
                self._early.begin(load.request, load.job, ticket)
                return load.request
        return None

    def reclaim(self) -> bool:
        """Gives up the blocks of the newest request that is ready, because running requests cannot
        go on otherwise. Returns False when there is none."""
        if not self.ready:
            return False
        request = max(self.ready, key=lambda one: one.arrival_order)
        self.ready.remove(request)
        self._requeue(request)
        return True

    def request_ended(self, request: Request) -> None:
        """Takes the blocks of a request that loads: they are free when nothing writes them."""
        self.ready.remove(request)
        load = self._loads.pop(request.request_id, None)
        if load is not None:
            del self._of_job[load.job]
            self._held[load.job] = self._kv_cache.take_blocks(request.request_id)

    def jobs_done(self, jobs: dict[int, bool]) -> None:
        """Goes on after jobs of the tier, of which nothing is on its way any more."""
        if jobs and self._tier is not None:
            for num_blocks, seconds in self._tier.take_reads():
                self._disk_rate.took(num_blocks * self._kv_cache.least_block_size, seconds)
        for job, is_right in jobs.items():
            if job in self._storing:
                stored = self._storing.pop(job)
                self._num_storing -= len(stored)
                self._kv_cache.free_blocks(stored)
            elif job in self._held:
                self._fence.release(self._held.pop(job))
            elif job in self._of_job:
                self._load_done(self._of_job.pop(job), is_right)
            if not is_right and self._tier is not None:
                self._tier.let_go(job)
        self.store_offered()

    def _load_done(self, load: _Load, is_right: bool) -> None:
        self._count(load, is_right)
        if load.is_early:
            self._early.load_done(load.request, load.job, is_right=is_right)
            return
        del self._loads[load.request.request_id]
        if is_right:
            self.ready.add(load.request)
        else:
            self._requeue(load.request)

    def _count(self, load: _Load, is_right: bool) -> None:
        if is_right:
            self.num_loaded_tokens += load.num_tokens
            self.num_tokens_from_disk += load.num_from_disk
            self.num_tokens_loaded_again += 0 if load.is_first else load.num_tokens
        elif load.is_first and load.request.num_cached_tokens is not None:
            load.request.num_cached_tokens -= load.num_tokens

    def _requeue(self, request: Request) -> None:
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self._waiting.add(request)

    def forget_all(self) -> None:
        """Forgets what lies in host memory, and what was to go there."""
        self._offered.clear()
        if self._tier is not None:
            self._tier.forget_all()

    def blocks(self) -> list[KVCacheBlock]:
        """Returns the blocks that jobs hold, and no request."""
        return [
            b for held in (self._storing, self._held) for blocks in held.values() for b in blocks
        ]

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        left = [f"load of request {name}" for name in self._loads]
        left += [f"{len(blocks)} blocks held by load {job}" for job, blocks in self._held.items()]
        return left + [f"{len(blocks)} blocks being stored" for blocks in self._storing.values()]
