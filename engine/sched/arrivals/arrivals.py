"""All KV that comes to waiting requests: one `KVArrival` for each, moved through its life.

`move` is the only place where an arrival changes its state; `arrival.py` beside it draws the
states and has the table of changes. Sources decide what comes next, each in a file of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from engine.config import SchedulingPolicy
from engine.contracts.request import Request, RequestStatus
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import (
    IDLE_WITH_BLOCKS,
    IN_MOTION,
    NEXT_STATES,
    WITH_BLOCKS,
    ArrivalState,
    KVArrival,
    KVSource,
    TransferArrival,
)
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.metadata import TransferName


class Arrivals:
    """Finds arrivals by request id, transfer id and state. Requests whose arrival ended without KV
    go back to `waiting`."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        fence: StepFence,
        held: HeldBlocks,
        waiting: RequestQueue,
        policy: SchedulingPolicy,
    ) -> None:
        self._kv_cache = kv_cache
        self._fence = fence
        self._held = held
        self._waiting = waiting
        self.prefix_sources: list[KVSource[Any]] = []
        """Bring the beginning of any prompt; each is asked for what those before it lack."""
        self.ready = RequestQueue(policy)
        """The requests of all arrivals that are READY."""
        self._of_request: dict[str, KVArrival] = {}
        self._of_transfer: dict[TransferName, TransferArrival] = {}
        self._in: dict[ArrivalState, dict[str, KVArrival]] = {state: {} for state in ArrivalState}
        self._num_of: Counter[KVSource[Any]] = Counter()

    # What there is ----------------------------------------------------------------------------

    def get(self, request_id: str) -> KVArrival | None:
        return self._of_request.get(request_id)

    def of_transfer(self, name: TransferName) -> TransferArrival | None:
        """Returns the arrival that this attempt brings; None: nothing of it is in motion."""
        arrival = self._of_transfer.get(name)
        return arrival if arrival is not None and arrival.state in IN_MOTION else None

    def in_state(self, state: ArrivalState) -> list[KVArrival]:
        return list(self._in[state].values())

    def any_in(self, state: ArrivalState) -> bool:
        return bool(self._in[state])

    @property
    def num_started(self) -> int:
        """Returns the number of requests that wait for KV, or for a row with it."""
        elsewhere = len(self._in[ArrivalState.QUEUED]) + len(self._in[ArrivalState.EARLY])
        return len(self._of_request) - elsewhere

    def num_started_of(self, source: KVSource[Any]) -> int:
        """Returns the number of arrivals from one source that have left the waiting queue."""
        return self._num_of[source]

    @property
    def num_with_blocks(self) -> int:
        return sum(len(self._in[state]) for state in WITH_BLOCKS)

    def count_by_state(self) -> dict[str, int]:
        """Returns how many arrivals are in each state that any is in."""
        return {state.name.lower(): len(found) for state, found in self._in.items() if found}

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return [f"KV for request {n} ({a.state.name})" for n, a in self._of_request.items()]

    # From the queue to a row ------------------------------------------------------------------

    def find(self, request: Request, num_computed_tokens: int) -> tuple[KVSource[Any], int] | None:
        """Returns who brings what follows the computed tokens, and how many tokens that may be:
        the source of an arrival that is QUEUED, or else the first that has any. Those behind it
        are asked too, of what it lacks, since they may not be worth asking. None: no source."""
        arrival = self._of_request.get(request.request_id)
        sources = self._sources_of(request) if arrival is None else [arrival.source]
        first: tuple[KVSource[Any], int] | None = None
        for source in sources:
            count = source.find(request, num_computed_tokens)
            num_computed_tokens += count
            if count and first is None:
                first = source, count
        return first

    def num_certain(self, request: Request, num_computed_tokens: int) -> int:
        """Returns how many tokens behind the computed ones the first source brings for certain."""
        for source in self._sources_of(request)[:1]:
            if source.finds_certainly:
                return source.find(request, num_computed_tokens)
        return 0

    def _sources_of(self, request: Request) -> list[KVSource[Any]]:
        """Returns those that may bring its prefix: none of a prompt whose tokens are all computed,
        for their log probabilities."""
        return [] if request.needs_prompt_logprobs else self.prefix_sources

    def add(self, arrival: KVArrival) -> None:
        """Adds one that is QUEUED."""
        request_id = arrival.request.request_id
        assert request_id not in self._of_request
        self._of_request[request_id] = self._in[arrival.state][request_id] = arrival

    def begin(
        self, arrival: KVArrival, num_before: int, num_coming: int, state: ArrivalState
    ) -> None:
        """Moves to COMING or ASKED, one that was added or a new one: blocks for the request's whole
        need are allocated."""
        known = self._of_request.get(arrival.request.request_id)
        if known is None:
            self.add(arrival)
        assert known in (None, arrival), "KV arrives for this request already"
        self.move(arrival, state)
        arrival.num_before, arrival.num_coming = num_before, num_coming
        arrival.request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        if state is ArrivalState.ASKED:
            arrival.asked_at = time.monotonic()
            arrival.request.num_computed_tokens = num_before

    def come(self, arrival: KVArrival, num_tokens: int, *, is_by_token: bool = False) -> bool:
        """Goes on after the answer of a source that was asked: it brings the first `num_tokens`
        tokens, as far as they are not here, whole blocks or `is_by_token`. Returns False if it
        has none that is lacking, or there is no room: the request goes on without."""
        if num_tokens <= arrival.num_before:
            self.here(arrival, arrival.num_before)
            return False
        if not self._kv_cache.skip_to(arrival.request, num_tokens, is_by_token=is_by_token):
            self.compute_all(arrival)
            return False
        num_coming = num_tokens - arrival.num_before
        self.begin(arrival, arrival.num_before, num_coming, ArrivalState.COMING)
        return True

    def name_transfer(self, arrival: TransferArrival, name: TransferName) -> None:
        """Names the attempt by which the arrival is found, and by no earlier one any more."""
        self._forget_transfer(arrival)
        arrival.transfer = name
        self._of_transfer[name] = arrival

    def _forget_transfer(self, arrival: TransferArrival) -> None:
        if arrival.transfer is not None:
            self._of_transfer.pop(arrival.transfer, None)

    def here(self, arrival: KVArrival, num_computed_tokens: int) -> None:
        """Goes on behind KV of a prompt's beginning that is complete, with the next source for
        what is lacking, or READY: what came may be a part, or nothing. What a request waited for a
        source that was asked counts as queue."""
        request = arrival.request
        if arrival.asked_at:
            request.first_scheduled_at = time.monotonic()
        nothing_came = num_computed_tokens <= arrival.num_before and not arrival.goes_on
        if nothing_came and not self._kv_cache.behind.is_chain:
            # States of what is cached are copied where a request begins, which it does anew.
            self.compute_all(arrival)
            return
        request.num_computed_tokens = num_computed_tokens
        if arrival.state is ArrivalState.COMING:
            is_all = num_computed_tokens >= arrival.num_before + arrival.num_coming
            self.move(arrival, ArrivalState.HERE if is_all else ArrivalState.PART)
        index = self.prefix_sources.index(arrival.source)
        for source in self.prefix_sources[index + 1 :]:
            if count := source.find(request, num_computed_tokens):
                self.move(arrival, ArrivalState.ENDED)
                source.begin(request, num_computed_tokens, count)
                self._of_request[request.request_id].goes_on = True
                return
        self.move(arrival, ArrivalState.READY)

    def has_next(self, arrival: KVArrival, num_computed_tokens: int) -> bool:
        """Returns whether `here` would ask another source for what is lacking then."""
        index = self.prefix_sources.index(arrival.source)
        later = self.prefix_sources[index + 1 :]
        return any(source.find(arrival.request, num_computed_tokens) for source in later)

    def take_ready(self) -> Request:
        """Returns the first request of `ready`, which enters a row now."""
        request = self.ready.peek()
        self.move(self._of_request[request.request_id], ArrivalState.ENDED)
        return request

    def reclaim(self, *, is_idle_class: bool = False) -> bool:
        """Gives up the KV of the newest request that has some but no row, because running requests
        cannot go on otherwise. Returns False when there is none. `is_idle_class`: of that alone,
        because others cannot begin."""
        idle = self.reclaimable(is_idle_class=is_idle_class)
        if not idle:
            return False
        arrival = max(idle, key=lambda arrival: arrival.request.arrival_order)
        if arrival.state is ArrivalState.READY:
            self.compute_all(arrival)
            return True
        self.release_blocks(arrival)
        is_part = arrival.state is ArrivalState.PART
        self.move(arrival, ArrivalState.NOTHING if is_part else ArrivalState.RECLAIMED)
        return True

    def reclaimable(self, *, is_idle_class: bool = False) -> list[KVArrival]:
        """Returns whose KV `reclaim` might give up."""
        return [
            arrival
            for state in IDLE_WITH_BLOCKS
            for arrival in self._in[state].values()
            if arrival.request.is_idle_class or not is_idle_class
        ]

    # Ends -------------------------------------------------------------------------------------

    def end(self, request: Request) -> None:
        """Ends the arrival of a request that is aborted, or whose first token was its last. Blocks
        stay the request's unless they are still written."""
        arrival = self._of_request.get(request.request_id)
        if arrival is not None:
            self._stop(arrival)
            self.move(arrival, ArrivalState.ENDED)

    def go_on_without(self, arrival: KVArrival) -> None:
        """Computes the prompt in other blocks, without waiting for writers."""
        self._stop(arrival)
        self.compute_all(arrival)

    def failed(self, arrival: KVArrival) -> None:
        """Computes the prompt of one that was COMING and is of no use: no writer is left."""
        self.move(arrival, ArrivalState.NOTHING)
        self.compute_all(arrival)

    def compute_all(self, arrival: KVArrival) -> None:
        """Makes the request an ordinary one that waits, without blocks."""
        self.release_blocks(arrival)
        self.move(arrival, ArrivalState.ENDED)
        self.requeue(arrival.request)

    def requeue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens, request.prompt_work = 0, None
        self._waiting.add(request)

    def release_blocks(self, arrival: KVArrival) -> None:
        """Releases the request's blocks, which have no writer any more."""
        self._fence.release(self._kv_cache.take_blocks(arrival.request.request_id))

    def _stop(self, arrival: KVArrival) -> None:
        key = arrival.source.stop(arrival)
        if key is not None:
            self._held.hold(key, self._kv_cache.take_blocks(arrival.request.request_id))

    # The table --------------------------------------------------------------------------------

    def move(self, arrival: KVArrival, state: ArrivalState) -> None:
        """Raises ValueError for a change that the table lacks."""
        before, request_id = arrival.state, arrival.request.request_id
        if state not in NEXT_STATES[before]:
            raise ValueError(
                f"KV for request {request_id} cannot go from {before.name} to {state.name}"
            )
        del self._in[before][request_id]
        if before is ArrivalState.READY:
            self.ready.remove(arrival.request)
        was_started, arrival.state = before is not ArrivalState.QUEUED, state
        is_started = state not in (ArrivalState.QUEUED, ArrivalState.ENDED)
        self._num_of[arrival.source] += is_started - was_started
        if state is ArrivalState.ENDED:
            del self._of_request[request_id]
            if isinstance(arrival, TransferArrival):
                self._forget_transfer(arrival)
            return
        self._in[state][request_id] = arrival
        if state is ArrivalState.READY:
            self.ready.add(arrival.request)
