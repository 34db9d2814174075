"""KV from a store that all nodes share: blocks that another node computed, or that this one has
lost. They come through host memory, and are taken if that is sooner done than computed, by what was
seen of both.

    ASKED      the store is asked how many blocks it has; without an answer in time it has none
    COMING     blocks are read to host memory, compared there, and copied to the request's blocks
    NOTHING    a block was missing or damaged, or the store did not bring it in time: the prompt is
               computed, but for what is in host memory now

A store that does not answer costs a few prompts `_ASK_LIMIT_S` each, and then none: it is asked
again when it has answered what it was asked before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.contracts.request import Request
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import ArrivalState, KVArrival, WriterKey
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.source_rate import SourceRate
from engine.sched.counters import PrefillRate
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.tier import Tier

_ASK_LIMIT_S = 0.5
_READ_LIMIT_S = 10.0
_LONGEST_LOOK_S = 1.0
"""Looks at what waits follow each other sooner, unless this process stands still."""
_MOST_UNANSWERED = 4
"""Limits the questions that are open and late."""
_FEWEST_BLOCKS = 2
"""Is not asked for less."""


@dataclass(slots=True, eq=False)
class StoreLoad(KVArrival):
    """Has the question's number in `job` while ASKED, of which `names` are asked, then the load's.
    `is_first`: the request was
    not preempted before."""

    job: int = -1
    names: list[BlockHash] = field(default_factory=list)
    is_first: bool = True
    began_at: float = 0.0
    waited_s: float = 0.0


class StoreSource:
    """Without a store it never has anything."""

    finds_certainly, writes_by_token = False, False

    def __init__(
        self,
        arrivals: Arrivals,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        prefill_rate: PrefillRate,
    ) -> None:
        self._arrivals = arrivals
        self._tier = connector.host_tier
        self._kv_cache = kv_cache
        self._prefill_rate = prefill_rate
        self._rate = SourceRate()
        self._looked_at = time.monotonic()
        self.num_tokens = 0
        """Prompt tokens whose KV came."""
        self.num_tokens_again = 0
        """Those of them whose requests had been preempted, and looked up before."""
        self.num_cheaper_to_compute = 0
        self._asked: dict[int, StoreLoad] = {}
        self._given_up: set[int] = set()
        self._loads: dict[int, StoreLoad] = {}

    @property
    def is_on(self) -> bool:
        return self._tier is not None and self._tier.has_store

    # As a source ------------------------------------------------------------------------------

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """At least one token is left to be computed."""
        tier = self._tier
        if tier is None or not tier.has_store or request.asks_store is False:
            return 0
        block_size = self._kv_cache.least_block_size
        most = self._kv_cache.behind.find(request, request.num_tokens - 1, lambda name: True)
        count = most - num_computed_tokens
        if request.needs_prompt_logprobs or count < _FEWEST_BLOCKS * block_size:
            return 0
        if not tier.may_ask_store or len(self._given_up) >= _MOST_UNANSWERED:
            return 0
        if request.asks_store is None:
            request.asks_store = self._is_worth_it(count)
            self.num_cheaper_to_compute += not request.asks_store
        return count if request.asks_store else 0

    def _is_worth_it(self, num_tokens: int) -> bool:
        own = self._prefill_rate.tokens_per_s
        seconds = self._rate.seconds_for(num_tokens)
        return not own or self._rate.verdict(seconds, num_tokens / own, num_tokens).is_to_take

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        assert self._tier is not None
        load = StoreLoad(request, self, is_first=request.num_preemptions == 0)
        request.asks_store = False
        self._arrivals.add(load)
        self._arrivals.begin(load, num_computed_tokens, num_tokens, ArrivalState.ASKED)
        behind, stop = self._kv_cache.behind, num_computed_tokens + num_tokens
        load.names = behind.wanted(request, num_computed_tokens, stop)
        load.job = self._tier.ask_store(load.names, is_chain=behind.is_chain)
        self._asked[load.job] = load

    def stop(self, arrival: StoreLoad) -> WriterKey | None:
        self._asked.pop(arrival.job, None)
        return arrival.job if self._loads.pop(arrival.job, None) is not None else None

    # What the tier says -----------------------------------------------------------------------

    def found(self, answers: dict[int, list[int]]) -> None:
        """Goes on after answers of the store, by question: places of blocks that it has."""
        for job, places in answers.items():
            self._given_up.discard(job)
            load = self._asked.pop(job, None)
            if load is not None:
                self._rate.ask_s = time.monotonic() - load.asked_at
                self._take(load, {load.names[place] for place in places})

    def _take(self, load: StoreLoad, has: set[BlockHash]) -> None:
        assert self._tier is not None
        request, before = load.request, load.num_before
        stop = self._end_of(load, has)
        if stop <= before:
            self._arrivals.here(load, before)
            return
        if not self._kv_cache.skip_to(request, stop, is_by_token=False):
            self._arrivals.compute_all(load)
            return
        names, blocks = self._kv_cache.behind.blocks(request, before, stop)
        num_tokens = stop - before
        self._arrivals.begin(load, load.num_before, num_tokens, ArrivalState.COMING)
        load.began_at = time.monotonic()
        load.job = self._tier.load(names, blocks, Tier.STORE)
        self._loads[load.job] = load

    def _end_of(self, load: StoreLoad, has: set[BlockHash]) -> int:
        """Returns the tokens of the longest prefix of which the store `has` all blocks that the
        request lacks, as far as host memory has room for a part."""
        assert self._tier is not None
        before, behind = load.num_before, self._kv_cache.behind
        if behind.is_chain:
            found = load.names[: len(has)]
            return before + self._tier.num_with_room(found) * self._kv_cache.least_block_size
        stop = behind.find(load.request, before + load.num_coming, has.__contains__)
        if stop <= before:
            return before
        names, _ = behind.blocks(load.request, before, stop)
        # The cache may have blocks now that it had not when the request got its own.
        comes = has.issuperset(names) and self._tier.num_with_room(names) == len(names)
        return stop if comes else before

    def jobs_done(self, jobs: dict[int, bool]) -> None:
        """Goes on after jobs of the tier, of which nothing is on its way any more. By job: whether
        it is right."""
        for job, is_right in jobs.items():
            load = self._loads.pop(job, None)
            if load is None:
                continue
            seconds = time.monotonic() - load.began_at
            self._rate.took(load.num_coming, seconds)
            if is_right:
                self._count(load)
                self._arrivals.here(load, load.num_before + load.num_coming)
            else:
                self._arrivals.failed(load)

    def _count(self, load: StoreLoad) -> None:
        self.num_tokens += load.num_coming
        self.num_tokens_again += 0 if load.is_first else load.num_coming
        if load.is_first and load.request.num_cached_tokens is not None:
            load.request.num_cached_tokens += load.num_coming

    def check_answers(self) -> None:
        """Gives up on a store that does not answer, before each step."""
        now = time.monotonic()
        waited_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        for load in list(self._asked.values()):
            load.waited_s += waited_s
            if load.waited_s > _ASK_LIMIT_S:
                del self._asked[load.job]
                self._given_up.add(load.job)
                self._arrivals.here(load, load.num_before)
        for load in list(self._loads.values()):
            load.waited_s += waited_s
            if self._tier and load.waited_s > _READ_LIMIT_S and self._tier.give_up(load.job):
                del self._loads[load.job]
                self._rate.took(load.num_coming, load.waited_s)
                self._arrivals.failed(load)

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return [
            f"load {load.job} from the store for request {load.request.request_id}"
            for load in (*self._asked.values(), *self._loads.values())
        ]
