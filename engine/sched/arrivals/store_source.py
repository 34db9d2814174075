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
from engine.sched.arrivals.tier_source import ArrivalsByJob, TierArrival, TierSource
from engine.sched.counters import PrefillRate
from kv_transfer.base import HostTier
from kv_transfer.metadata import KVConnectorOutput
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


class StoreSource(TierSource[StoreLoad]):
    finds_certainly, behind = False, Tier.STORE

    def __init__(
        self,
        arrivals: Arrivals,
        tier: HostTier | None,
        kv_cache: KVCacheManager,
        prefill_rate: PrefillRate,
    ) -> None:
        super().__init__(arrivals, tier, kv_cache, prefill_rate)
        self._asked = ArrivalsByJob[StoreLoad]("question to the store")
        self._given_up: set[int] = set()

    @property
    def is_on(self) -> bool:
        return super().is_on and self.tier.has_store

    def find(self, request: Request, num_computed_tokens: int) -> int:
        if request.asks_store is False:
            return 0
        most = self._kv_cache.behind.find(request, request.num_tokens - 1, lambda name: True)
        count = most - num_computed_tokens
        if count < _FEWEST_BLOCKS * self._kv_cache.least_block_size:
            return 0
        if not self.tier.may_ask_store or len(self._given_up) >= _MOST_UNANSWERED:
            return 0
        if request.asks_store is None:
            request.asks_store = self.is_worth(count, count)
        return count if request.asks_store else 0

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        load = StoreLoad(request, self)
        request.asks_store = False
        self._arrivals.begin(load, num_computed_tokens, num_tokens, ArrivalState.ASKED)
        behind = self._kv_cache.behind
        load.names = behind.wanted(request, num_computed_tokens, load.stop)
        self._asked.add(load, self.tier.ask_store(load.names, is_chain=behind.is_chain))

    def stop(self, arrival: StoreLoad) -> WriterKey | None:
        self._asked.take(arrival)
        return super().stop(arrival)

    def update(self, output: KVConnectorOutput) -> None:
        self._given_up.difference_update(output.store_found)
        for load, places in self._asked.ended(output.store_found):
            self.rate.ask_s = time.monotonic() - load.began_at
            stop = self._end_of(load, {load.names[place] for place in places})
            if self._arrivals.come(load, stop):
                self.load(load)
        for load, is_right in self.loads.ended(output.host_jobs):
            seconds = time.monotonic() - load.began_at
            if is_right:
                self.rate.took(load.num_read, seconds)
            else:
                self.read_failed(load, seconds)
            self.loaded(load, is_right=is_right)

    def _end_of(self, load: StoreLoad, has: set[BlockHash]) -> int:
        """Returns the tokens of the longest prefix of which the store `has` all blocks that the
        request lacks, as far as host memory has room for a part."""
        before, behind = load.num_before, self._kv_cache.behind
        if behind.is_chain:
            found = load.names[: len(has)]
            return before + self.tier.num_with_room(found) * self._kv_cache.least_block_size
        stop = behind.find(load.request, load.stop, has.__contains__)
        if stop <= before:
            return before
        names, _ = behind.blocks(load.request, before, stop)
        # The cache may have blocks now that it had not when the request got its own.
        comes = has.issuperset(names) and self.tier.num_with_room(names) == len(names)
        return stop if comes else before

    def check(self) -> None:
        for load in self._asked.overdue(_ASK_LIMIT_S):
            self._asked.take(load)
            self._given_up.add(load.job)
            self._arrivals.here(load, load.num_before)
        self.give_up(_READ_LIMIT_S)

    def leftovers(self) -> list[str]:
        return self._asked.leftovers() + super().leftovers()
