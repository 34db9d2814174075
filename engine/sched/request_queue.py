"""Requests in the order in which they may go on."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.config import SchedulingPolicy
from engine.contracts.request import Request

_MOST_STALE = 64
"""Entries of requests that have left, of which a heap may have as many as of others, and these."""

SortKey = tuple[int, float, int]
_Entry = tuple[SortKey, int, Request]


class RequestQueue:
    """A heap by `Request.sort_key`: order of arrival (the idle class last), or priority first.

    A request that comes back (preempted, a failed transfer) takes its old place: ahead of all
    that arrived later. Removal from the middle leaves a stale entry, which is skipped when it is
    first, or dropped when there are many: those at the end would keep their prompts for long.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy: SchedulingPolicy = policy
        self._heaps: tuple[list[_Entry], ...] = ([],)
        self._line = 0
        """The heap by which requests leave."""
        self._tickets: dict[str, tuple[int, int]] = {}
        """request id -> (ticket of its valid entry, tokens counted for it)."""
        self._next_ticket = 0
        self.num_tokens = 0
        """Known tokens of all requests in the queue, when they entered it."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._tickets

    def __iter__(self) -> Iterator[Request]:
        """Iterates in no particular order."""
        return (entry[2] for entry in self._heaps[0] if self._is_valid(entry))

    def add(self, request: Request) -> None:
        """Raises `ValueError` when the request is queued already."""
        if request in self:
            raise ValueError(f"request {request.request_id!r} is queued already")
        self._next_ticket += 1
        self._tickets[request.request_id] = (self._next_ticket, request.num_tokens)
        self.num_tokens += request.num_tokens
        for heap, key in zip(self._heaps, self._keys(request), strict=True):
            heapq.heappush(heap, (key, self._next_ticket, request))

    def _keys(self, request: Request) -> tuple[SortKey, ...]:
        """Returns the request's place in each heap."""
        return (request.sort_key(self._policy),)

    def peek(self) -> Request:
        """Raises `IndexError` when the queue is empty."""
        return self._first(self._line)[2]

    @property
    def first_key(self) -> SortKey:
        """Returns the key of the request that leaves next. Raises `IndexError` without one."""
        return self._first(self._line)[0]

    def _first(self, line: int) -> _Entry:
        heap = self._heaps[line]
        while not self._is_valid(heap[0]):
            heapq.heappop(heap)
        return heap[0]

    def pop(self) -> Request:
        """Raises `IndexError` when the queue is empty."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Takes it from wherever it is; a request that is not queued is left alone."""
        if request in self:
            self.num_tokens -= self._tickets.pop(request.request_id)[1]
        most = 2 * len(self._tickets) + _MOST_STALE if self._tickets else 0
        for heap in self._heaps:
            if len(heap) > most:
                heap[:] = [entry for entry in heap if self._is_valid(entry)]
                heapq.heapify(heap)

    def _is_valid(self, entry: _Entry) -> bool:
        _, ticket, request = entry
        return self._tickets.get(request.request_id, (0, 0))[0] == ticket
