"""Holds the requests that a plan is made for, and what is said about them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.simulation.requests import SimRequest
from router.request.info import RequestInfo, SessionSource

MAX_SPAN_S = 400 * 86_400.0
"""Is the longest time that traffic may cover."""
_MIN_SPAN_S = 1e-9
_ROUTER_BLOCK_TOKENS = 1024
"""The router hashes pieces of a prompt's text of about this length."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Is one request. `blocks`: hashes of the complete blocks of its prompt, as a chain."""

    at_s: float
    num_prompt: int
    num_output: int
    session: str = ""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Holds arrivals in order of time, the first at 0 or later. `name` says where they are from;
    `block_tokens` is the length of their blocks. `goes_on`: they are a part, behind which others
    come."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 512
    goes_on: bool = False

    @property
    def span_s(self) -> float:
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    @property
    def rate(self) -> float:
        """Returns requests in a second."""
        # Times of a trace may be so close that the number would be infinite.
        return (len(self.arrivals) - 1) / max(_MIN_SPAN_S, self.span_s) if self.span_s else 0.0

    @property
    def mean_prompt(self) -> float:
        return statistics.fmean(arrival.num_prompt for arrival in self.arrivals)

    @property
    def mean_output(self) -> float:
        return statistics.fmean(arrival.num_output for arrival in self.arrivals)

    def hit_limit(self) -> float:
        """Returns the part of the prompt tokens that one endless cache would have."""
        seen: set[int] = set()
        hits = total = 0
        for arrival in self.arrivals:
            known = self.block_tokens * sum(block in seen for block in arrival.blocks)
            hits += min(known, arrival.num_prompt - 1)
            total += arrival.num_prompt
            seen.update(arrival.blocks)
        return hits / total

    def busiest(self, count: int) -> Traffic:
        """Returns the `count` requests in a row that come in the shortest time; all, if there are
        no more."""
        arrivals = self.arrivals
        if len(arrivals) <= count:
            return self
        first = min(
            range(len(arrivals) - count + 1),
            key=lambda i: arrivals[i + count - 1].at_s - arrivals[i].at_s,
        )
        start_s = arrivals[first].at_s
        part = arrivals[first : first + count]
        part = tuple(replace(a, at_s=a.at_s - start_s) for a in part)
        return replace(self, arrivals=part, goes_on=True)

    def sim_requests(self) -> list[SimRequest]:
        seen: set[str] = set()
        found = []
        for number, arrival in enumerate(self.arrivals):
            found.append(_sim_request(number, arrival, arrival.session in seen, self.block_tokens))
            seen.add(arrival.session)
        return found


def _sim_request(number: int, arrival: Arrival, is_later: bool, block_tokens: int) -> SimRequest:
    step = max(1, _ROUTER_BLOCK_TOKENS // block_tokens)
    info = RequestInfo(
        path="/v1/chat/completions",
        request_id=str(number),
        session_key=(arrival.session or f"#{number}").encode(),
        session_source=SessionSource.HEADER if arrival.session else SessionSource.PROMPT,
        is_later_turn=bool(arrival.session) and is_later,
        num_prompt_tokens=arrival.num_prompt,
        prefix_blocks=arrival.blocks[step - 1 :: step],
        tokens_per_block=step * block_tokens,
        max_tokens=0,
    )
    return SimRequest(arrival.at_s, arrival.num_prompt, arrival.num_output, arrival.blocks, info)


def in_order(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Returns them by time, the first at 0."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    start_s = ordered[0].at_s
    return tuple(replace(arrival, at_s=arrival.at_s - start_s) for arrival in ordered)
