"""Keeps what sources share whose KV jobs of the host tier bring: which job brings it, how long it
has been waited for, whether reading is sooner done than computing, and how much of it has come."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.contracts.request import Request
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import ArrivalState, KVArrival, WriterKey
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.source_rate import SourceRate
from engine.sched.counters import PrefillRate
from kv_transfer.base import HostTier
from kv_transfer.metadata import KVConnectorOutput
from kv_transfer.tier import Tier

_LONGEST_LOOK_S = 1.0
"""Looks at what waits follow each other sooner, unless this process stands still. Of a short limit
a look takes no more than half."""


@dataclass(slots=True, eq=False)
class TierArrival(KVArrival):
    """KV that jobs bring.

    Attributes:
        job: The latest, which asks or loads.
        num_read: Tokens among those that come, which are read from behind host memory.
        is_first: The request was not preempted before.
        began_at: CLOCK_MONOTONIC seconds at which the job began.
        waited_s: How long its jobs have been waited for, without what this process stood still.
    """

    job: int = -1
    num_read: int = 0
    is_first: bool = field(init=False)
    began_at: float = 0.0
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.is_first = self.request.num_preemptions == 0

    @property
    def stop(self) -> int:
        """Returns the number of leading tokens that have their KV once all is here."""
        return self.num_before + self.num_coming


_Arrival = TypeVar("_Arrival", bound=TierArrival)
_Answer = TypeVar("_Answer")


class ArrivalsByJob(Generic[_Arrival]):
    """The arrivals that wait for a job each, whatever becomes of their requests."""

    def __init__(self, what: str) -> None:
        """Calls a job `what` where it is left over."""
        self._what = what
        self._of_job: dict[int, _Arrival] = {}
        self._looked_at = time.monotonic()

    def __iter__(self) -> Iterator[_Arrival]:
        return iter(list(self._of_job.values()))

    def get(self, job: int) -> _Arrival | None:
        return self._of_job.get(job)

    def add(self, arrival: _Arrival, job: int) -> None:
        arrival.job, arrival.began_at = job, time.monotonic()
        self._of_job[job] = arrival

    def take(self, arrival: _Arrival) -> bool:
        """Forgets the arrival's job. Returns False for a job that is none of these."""
        return self._of_job.pop(arrival.job, None) is not None

    def ended(self, answers: Mapping[int, _Answer]) -> Iterator[tuple[_Arrival, _Answer]]:
        """Takes the arrivals whose jobs are among these, with what became of each."""
        for job, answer in answers.items():
            if (arrival := self._of_job.pop(job, None)) is not None:
                yield arrival, answer

    def overdue(
        self, limit_s: float, is_limited: Callable[[_Arrival], bool] = lambda arrival: True
    ) -> Iterable[_Arrival]:
        """Returns those that have waited for more than `limit_s`, of those that `is_limited` is
        true of. Looks follow each other, one before each step: time between two counts little,
        since the tier may have answered."""
        now = time.monotonic()
        longest_s = min(_LONGEST_LOOK_S, limit_s / 2)
        waited_s, self._looked_at = min(now - self._looked_at, longest_s), now
        limited = [arrival for arrival in self if is_limited(arrival)]
        for arrival in limited:
            arrival.waited_s += waited_s
        return [arrival for arrival in limited if arrival.waited_s > limit_s]

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return [
            f"{self._what} {job} for request {arrival.request.request_id}"
            for job, arrival in self._of_job.items()
        ]


@dataclass(slots=True)
class TierCounters:
    """Counts since the start, of KV from host memory and what lies `behind` it.

    Attributes:
        behind: The tier from which blocks are read that host memory lacks.
        tokens: Tokens of prompts whose KV came.
        tokens_read: Those of them that were read from behind host memory.
        tokens_again: Those of them whose requests had been preempted, and looked up before.
        cheaper_to_compute: Prompts that computed what might have come.
    """

    behind: Tier
    tokens: int = 0
    tokens_read: int = 0
    tokens_again: int = 0
    cheaper_to_compute: int = 0

    def came(self, arrival: TierArrival) -> None:
        """Counts an arrival of which all is here."""
        self.tokens += arrival.num_coming
        self.tokens_read += arrival.num_read
        self.tokens_again += 0 if arrival.is_first else arrival.num_coming

    def by_name(self) -> dict[str, float]:
        """Returns what metrics count of the tier itself."""
        return {f"{self.behind}_tier_cheaper_to_compute": float(self.cheaper_to_compute)}


class TierSource(ABC, Generic[_Arrival]):
    """Does of a `KVSource` all but find and begin. Without a tier it is off.

    1. `is_worth`   shall this be read, or computed?
    2. `load`       a job brings what comes to the request's blocks
    3. `give_up`    a read that takes too long has failed
    4. `loaded`     the job has ended: the request goes on behind the KV, or computes it

    What comes counts as cached from 2 on, unless it fails or is called off.
    """

    behind: Tier
    """The tier from which blocks are read that host memory lacks."""
    finds_certainly: bool
    writes_by_token = False

    def __init__(
        self,
        arrivals: Arrivals,
        tier: HostTier | None,
        kv_cache: KVCacheManager,
        prefill_rate: PrefillRate,
    ) -> None:
        """Takes `prefill_rate`, the speed of our own steps, against which reads are weighed."""
        self.counters, self.rate = TierCounters(self.behind), SourceRate()
        self.loads = ArrivalsByJob[_Arrival](f"load ({self.behind})")
        self._arrivals = arrivals
        self._tier = tier
        self._kv_cache = kv_cache
        self._prefill_rate = prefill_rate

    @abstractmethod
    def find(self, request: Request, num_computed_tokens: int) -> int:
        """Does as `KVSource.find`; at least one token is left to be computed."""

    @abstractmethod
    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        """Does as `KVSource.begin`."""

    @abstractmethod
    def check(self) -> None:
        """Does as `KVSource.check`, by `give_up`."""

    @abstractmethod
    def update(self, output: KVConnectorOutput) -> None:
        """Goes on after answers and ends of jobs, of which nothing is on its way any more."""

    @property
    def is_on(self) -> bool:
        return self._tier is not None

    @property
    def tier(self) -> HostTier:
        """Returns the tier of a source that is on."""
        assert self._tier is not None
        return self._tier

    def is_worth(self, num_read: int, num_saved: int, *, trusts_larger: bool = True) -> bool:
        """Returns whether `num_read` tokens are sooner read than `num_saved` are computed, by what
        was seen of both. To be asked once a request, since each answer is remembered."""
        own = self._prefill_rate.tokens_per_s
        found = self.rate.is_worth(num_read, num_saved, own, trusts_larger=trusts_larger)
        self.counters.cheaper_to_compute += not found
        return found

    def load(self, load: _Arrival) -> None:
        """Begins to load what comes, of an arrival that is COMING."""
        request, before = load.request, load.num_before
        names, blocks = self._kv_cache.behind.blocks(request, before, load.stop)
        load.num_read = self.num_read(load, names)
        _count_cached(load, load.num_coming)
        self.loads.add(load, self.tier.load(names, blocks, self.behind))

    def num_read(self, load: _Arrival, names: Sequence[BlockHash]) -> int:
        """Returns how many of the tokens that come, in blocks of these `names`, are read from
        behind host memory."""
        return load.num_coming

    def stop(self, arrival: _Arrival) -> WriterKey | None:
        if not self.loads.take(arrival):
            return None
        _count_cached(arrival, -arrival.num_coming)
        return arrival.job

    def give_up(
        self, limit_s: float, is_limited: Callable[[_Arrival], bool] = lambda load: True
    ) -> list[_Arrival]:
        """Gives up loads of which nothing is copied yet after `limit_s`, before each step: their
        prompts are computed. Returns them."""
        overdue = self.loads.overdue(limit_s, is_limited)
        given_up = [load for load in overdue if self.tier.give_up(load.job)]
        for load in given_up:
            self.read_failed(load, load.waited_s)
            self.loads.take(load)
            self.loaded(load, is_right=False)
        return given_up

    def read_failed(self, load: _Arrival, seconds: float) -> None:
        """Records that what was to be read did not come, which was known after `seconds`."""
        own_seconds = self._prefill_rate.seconds_for(load.num_read)
        self.rate.failed(load.num_read, seconds, own_seconds)

    def loaded(self, load: _Arrival, *, is_right: bool) -> None:
        """Goes on after a load that has ended, whatever has become of its request."""
        if is_right:
            self.counters.came(load)
        else:
            _count_cached(load, -load.num_coming)
        if load.state is ArrivalState.COMING and is_right:
            self._arrivals.here(load, load.stop)
        elif load.state is ArrivalState.COMING:
            self._arrivals.failed(load)

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return self.loads.leftovers()


def _count_cached(load: TierArrival, num_tokens: int) -> None:
    request = load.request
    if load.is_first and request.num_cached_tokens is not None:
        request.num_cached_tokens += num_tokens
