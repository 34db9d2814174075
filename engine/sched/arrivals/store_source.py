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
from engine.sched.arrivals.arrival import ArrivalState, WriterKey
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.arrivals_by_job import ArrivalsByJob, TierArrival, TierCounters
from engine.sched.arrivals.source_rate import SourceRate
from engine.sched.counters import PrefillRate
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.tier import Tier

_ASK_LIMIT_S = 0.5
_READ_LIMIT_S = 10.0
_MOST_UNANSWERED = 4
"""Limits the questions that are open and late."""
_FEWEST_BLOCKS = 2
"""Is not asked for less."""


@dataclass(slots=True, eq=False)
class StoreLoad(TierArrival):
    """Has the question in `job` while ASKED, then the load. `names`: blocks that are asked for."""

    names: list[BlockHash] = field(default_factory=list)


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
        self.counters = TierCounters()
        self._arrivals = arrivals
        self._tier = connector.host_tier
        self._kv_cache = kv_cache
        self._prefill_rate, self._rate = prefill_rate, SourceRate()
        self._asked = ArrivalsByJob[StoreLoad]("question to the store")
        self._given_up: set[int] = set()
        self._loads = ArrivalsByJob[StoreLoad]("load from the store")

    @property
    def is_on(self) -> bool:
        return self._tier is not None and self._tier.has_store

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """At least one token is left to be computed."""
        if self._tier is None or not self.is_on or request.asks_store is False:
            return 0
        most = self._kv_cache.behind.find(request, request.num_tokens - 1, lambda name: True)
        count = most - num_computed_tokens
        fewest = _FEWEST_BLOCKS * self._kv_cache.least_block_size
        if request.needs_prompt_logprobs or count < fewest:
            return 0
        if not self._tier.may_ask_store or len(self._given_up) >= _MOST_UNANSWERED:
            return 0
        if request.asks_store is None:
            own = self._prefill_rate.tokens_per_s
            request.asks_store = self._rate.is_worth(count, count, own)
            self.counters.cheaper_to_compute += not request.asks_store
        return count if request.asks_store else 0

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        assert self._tier is not None
        load = StoreLoad(request, self, is_first=request.num_preemptions == 0)
        request.asks_store = False
        self._arrivals.add(load)
        self._arrivals.begin(load, num_computed_tokens, num_tokens, ArrivalState.ASKED)
        behind = self._kv_cache.behind
        load.names = behind.wanted(request, num_computed_tokens, load.stop)
        self._asked.add(load, self._tier.ask_store(load.names, is_chain=behind.is_chain))

    def stop(self, arrival: StoreLoad) -> WriterKey | None:
        self._asked.take(arrival)
        return arrival.job if self._loads.take(arrival) else None

    def found(self, answers: dict[int, list[int]]) -> None:
        """Goes on after answers of the store, by question: places of blocks that it has."""
        self._given_up.difference_update(answers)
        for load, places in self._asked.ended(answers):
            self._rate.ask_s = time.monotonic() - load.began_at
            self._take(load, {load.names[place] for place in places})

    def _take(self, load: StoreLoad, has: set[BlockHash]) -> None:
        assert self._tier is not None
        stop = self._end_of(load, has)
        if self._arrivals.come(load, stop):
            names, blocks = self._kv_cache.behind.blocks(load.request, load.num_before, stop)
            self._loads.add(load, self._tier.load(names, blocks, Tier.STORE))

    def _end_of(self, load: StoreLoad, has: set[BlockHash]) -> int:
        """Returns the tokens of the longest prefix of which the store `has` all blocks that the
        request lacks, as far as host memory has room for a part."""
        assert self._tier is not None
        before, behind = load.num_before, self._kv_cache.behind
        if behind.is_chain:
            found = load.names[: len(has)]
            return before + self._tier.num_with_room(found) * self._kv_cache.least_block_size
        stop = behind.find(load.request, load.stop, has.__contains__)
        if stop <= before:
            return before
        names, _ = behind.blocks(load.request, before, stop)
        # The cache may have blocks now that it had not when the request got its own.
        comes = has.issuperset(names) and self._tier.num_with_room(names) == len(names)
        return stop if comes else before

    def jobs_done(self, jobs: dict[int, bool]) -> None:
        """Goes on after jobs of the tier, of which nothing is on its way any more. By job: whether
        it is right."""
        for load, is_right in self._loads.ended(jobs):
            self._done(load, time.monotonic() - load.began_at, is_right=is_right)

    def check_answers(self) -> None:
        """Gives up on a store that does not answer, before each step."""
        for load in self._asked.overdue(_ASK_LIMIT_S):
            self._asked.take(load)
            self._given_up.add(load.job)
            self._arrivals.here(load, load.num_before)
        for load in self._loads.overdue(_READ_LIMIT_S):
            if self._tier and self._tier.give_up(load.job):
                self._loads.take(load)
                self._done(load, load.waited_s, is_right=False)

    def _done(self, load: StoreLoad, seconds: float, *, is_right: bool) -> None:
        self._rate.took(load.num_coming, seconds)
        if not is_right:
            self._arrivals.failed(load)
            return
        self.counters.came(load)
        if load.is_first and load.request.num_cached_tokens is not None:
            load.request.num_cached_tokens += load.num_coming
        self._arrivals.here(load, load.stop)

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return self._asked.leftovers() + self._loads.leftovers()
